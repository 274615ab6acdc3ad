"""Weights in compact form: how they are stored, packed for the kernels, and multiplied."""
