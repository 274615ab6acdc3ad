"""What waits, in the policy's order: sequences for blocks and a slot, requests for their deadlines to pass.

Knows orders and times; decides nothing. Both lists are kept sorted, so that whatever ends early leaves at once.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import attrgetter

from scheduler.config import SchedulingPolicy
from scheduler.request import Request
from scheduler.sequence import Group, Order, Sequence

_order = attrgetter("order")


def policy_order(policy: SchedulingPolicy, request: Request, arrival: int, choice: int) -> Order:
    """Where a sequence stands among all others. A preempted one comes back to the same place."""
    priority = request.priority if policy is SchedulingPolicy.PRIORITY else 0
    return (priority, arrival, choice)


class WaitingQueue:
    """Waiting sequences, first in order first.

    `num_new_requests` and `num_new_tokens` count requests that no step has touched yet, and their prompt tokens: these
    are what the queue's bounds are about. Preempted sequences and further choices were let in before.

    A parked sequence keeps its place and is counted, but is passed over: something it waits for is on its way.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._parked: set[Sequence] = set()
        self.num_new_requests = 0
        self.num_new_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        """In order, parked ones included."""
        return merge(self._sequences, sorted(self._parked, key=_order), key=_order)

    @property
    def head(self) -> Sequence | None:
        """The first in order of those that are not parked."""
        return self._sequences[0] if self._sequences else None

    def excess(self, num_free_slots: int) -> tuple[int, int]:
        """New requests, and their prompt tokens, that wait behind as many sequences as there are free slots."""
        behind = islice(self, num_free_slots, None)
        new = [s.num_prompt for s in behind if not s.group.has_begun]
        return len(new), sum(new)

    def push(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._sequences, sequence, key=_order)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, parked or not, before anything marks its request as begun."""
        if sequence in self._parked:
            self._parked.remove(sequence)
        else:
            self._take(sequence)
        self._count(sequence, -1)

    def park(self, sequence: Sequence) -> None:
        """Pass a sequence over until `unpark`."""
        self._take(sequence)
        self._parked.add(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Put a parked sequence back in its place."""
        self._parked.remove(sequence)
        insort(self._sequences, sequence, key=_order)

    def _take(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence, "a sequence that does not wait was taken out of the queue"
        del self._sequences[index]

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not sequence.group.has_begun:
            self.num_new_requests += sign
            self.num_new_tokens += sign * sequence.num_prompt


class Deadlines:
    """Moments at which live requests expire, soonest first."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Group]] = []

    def add(self, group: Group) -> None:
        """Watch a request's deadlines, if it has any."""
        for when_s in _moments(group.handle.request):
            insort(self._entries, (when_s, group.arrival, group), key=_moment)

    def discard(self, group: Group) -> None:
        """Stop watching a request that has ended."""
        for when_s in _moments(group.handle.request):
            index = bisect_left(self._entries, (when_s, group.arrival), key=_moment)
            if index < len(self._entries) and self._entries[index][2] is group:
                del self._entries[index]

    @property
    def next_s(self) -> float | None:
        """The soonest moment."""
        return self._entries[0][0] if self._entries else None

    def pop_expired(self, now_s: float) -> list[Group]:
        """Take out every moment up to `now_s`; give the requests that have expired by it."""
        expired: list[Group] = []
        while self._entries and self._entries[0][0] <= now_s:
            when_s, _, group = self._entries.pop(0)
            if when_s == group.handle.request.deadline_s or not group.has_begun:
                expired.append(group)
        return expired


def _moment(entry: tuple[float, int, Group]) -> tuple[float, int]:
    return entry[:2]


def _moments(request: Request) -> set[float]:
    return {when_s for when_s in (request.deadline_s, request.queue_deadline_s) if when_s is not None}
