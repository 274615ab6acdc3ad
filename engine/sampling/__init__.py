"""From logits to tokens. Importing this package imports no torch; `pipeline` and `state` do."""
