"""Who gives way when the pool runs out of blocks. Preemption is by recomputation: the victim keeps only its tokens.

The rule that rules out deadlock and livelock: memory is given out in policy order and taken from the other end, so a
sequence never loses its blocks to one behind it. The first in order therefore moves in every step, and as it fits the
pool alone (admission saw to that), it ends; then the next is first.
"""

from collections.abc import Callable

from scheduler.running import RunningSet
from scheduler.sequence import Sequence


def choose_victim(running: RunningSet) -> Sequence:
    """The running sequence that gives way: the last in policy order."""
    return running.sequences[-1]


def make_room(running: RunningSet, sequence: Sequence, num_tokens: int, preempt: Callable[[Sequence], None]) -> bool:
    """Preempt until `sequence` can write its next `num_tokens` tokens; False when it had to give way itself.

    Each round asks anew: a victim that shared blocks with `sequence` saves it their copies as well.
    """
    while not running.has_room(sequence, num_tokens):
        victim = choose_victim(running)
        preempt(victim)
        if victim is sequence:
            return False
    return True
