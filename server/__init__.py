"""The outside of Quire: HTTP, text, command line, metrics. `build` alone composes the storeys below."""
