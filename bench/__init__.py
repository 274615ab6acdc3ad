"""Measuring Quire: a load generator for any OpenAI-compatible server, and what this machine could do at best.

    python -m bench            the harness: cells of load, servers in turn, tables and plots (`make bench`)
    python -m bench.overhead   what a step and a streamed token cost the host, with a model that computes nothing
    python -m bench.mixture    what running streams feel of a long prompt
    python -m bench.startup    from the start of a process to its first answer
    python -m bench.models     makes the models that are measured, in a cache folder
    python -m bench.peers...   starts other servers to measure beside

Nothing here is imported by the packages that serve.
"""
