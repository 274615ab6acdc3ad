"""Asyncio continuous batching over a paged KV pool. Speaks requests, sequences, token ids and time.

Knows nothing of HTTP, text or tensors, and never imports torch: the engine is a protocol (`engine.batch.StepEngine`).
"""
