"""Decoders: a specification as data, one readable forward, and how checkpoint families map to it."""
