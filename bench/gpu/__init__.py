"""The parts of `bench/gpu_check.py`, one question a module."""
