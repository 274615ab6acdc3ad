"""Checkpoints: reading tensors by name from safetensors or GGUF, and assigning them strictly."""
