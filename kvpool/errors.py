"""Errors of the KV pool. Knows nothing of requests: a caller decides whether to wait, preempt or refuse."""


class KVPoolError(Exception):
    """Base of everything this package raises on purpose."""


class OutOfBlocks(KVPoolError):
    """Fewer blocks are free than were asked for; nothing was taken."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available
