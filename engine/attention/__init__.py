"""Attention over the paged pool, one backend a file, behind the protocol in `interface`."""
