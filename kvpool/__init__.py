"""Paged KV memory: which block belongs to whom (pool, table, prefix index) and the tensors behind it (storage).

The accounting half never imports torch; `kvpool.storage` alone does, and nothing here imports it for you.
"""
