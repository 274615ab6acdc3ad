"""Model execution: tensors, weights, logits, sampling. Knows nothing of HTTP, text, queues, or who asked.

`batch`, `config`, `errors`, `sampling.params` and `sampling.constraint` are torch-free: the scheduler speaks them.
"""
