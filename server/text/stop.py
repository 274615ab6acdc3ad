"""Finding stop strings in text that comes in pieces, showing nothing of them and holding back as little as possible.

Which stop string wins does not depend on how the text was cut: the one that is complete first; among those that end at
the same character, the longest. (That is what an engine sees that gets one character at a time: it ends as soon as any
of them is complete.) Knows nothing of tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string.

    Attributes:
        depth: its length.
        next: by character, to the prefix one longer.
        fail: the longest proper suffix of this prefix that is itself a prefix; None at the root.
        stop: the longest stop string that ends here.
    """

    depth: int = 0
    next: "dict[str, _Node]" = field(default_factory=dict)
    fail: "_Node | None" = None
    stop: str | None = None


def _build(stops: Sequence[str]) -> _Node:
    """The automaton of Aho & Corasick (1975) over `stops`; its state is the longest prefix that the text ends with."""
    root = _Node()
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.stop = stop
    waiting = deque((root, char, child) for char, child in root.next.items())
    while waiting:
        parent, char, node = waiting.popleft()
        node.fail = _step(parent.fail, char, root)
        node.stop = node.stop or node.fail.stop
        waiting.extend((node, key, child) for key, child in node.next.items())
    return root


def _step(node: _Node | None, char: str, root: _Node) -> _Node:
    """Where `char` leads from `node`."""
    while node is not None:
        found = node.next.get(char)
        if found is not None:
            return found
        node = node.fail
    return root


class StopMatcher:
    """Watches one text. Time is linear in the text, whatever the stop strings and the cuts.

    Attributes:
        matched: the stop string that ended the text; None while there is none.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        """`include_stop` leaves the stop string itself in the text. Raises ValueError on an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._include_stop = include_stop
        self._root = _build(stops)
        self._node = self._root
        self._held = ""  # what may still become a stop string: the prefix that `_node` stands for

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def push(self, text: str, *, honour: bool = True) -> str:
        """Take more text; give what can no longer be part of a stop string. Nothing after a match.

        With `honour` off, stop strings that are complete within `text` are let pass (the output is not long enough).
        """
        if self.matched is not None:
            return ""
        if not self._root.next:
            return text
        root, node = self._root, self._node
        for index, char in enumerate(text):
            if node is root and char not in root.next:  # nearly always
                continue
            node = _step(node, char, root)
            if node.stop is not None and honour:
                return self._match(node.stop, self._held + text[: index + 1])
        while not node.next and node.fail is not None:  # a stop string that was let pass cannot grow
            node = node.fail
        self._node = node
        text = self._held + text
        self._held = text[len(text) - node.depth :]
        return text[: len(text) - node.depth]

    def flush(self) -> str:
        """The text has ended: give what was held back."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _match(self, stop: str, text: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]
