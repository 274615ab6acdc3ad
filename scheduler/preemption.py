"""Who gives way when the pool runs out of blocks. Preemption is by recomputation: the victim keeps only its tokens.

Memory is given out in policy order and taken from those behind, so a sequence never loses its blocks to one behind it.
Of those behind, the least urgent give way first, and among equals whoever loses least: recomputing costs as many tokens
as the victim holds blocks that nobody shares.

Why everything ends. A sequence that was preempted `max_preemptions` times comes back only with blocks for all it may
ever need. It is then nobody's victim and never asks again, so it ends, whatever the others do. Who finds only such
sequences behind it gives way itself; that counts as well, so it is among them soon. Nobody is preempted more often.
"""

from collections.abc import Callable

from scheduler.request import PreemptionReason
from scheduler.running import RunningSet
from scheduler.sequence import Sequence

Preempt = Callable[[Sequence, PreemptionReason], None]


def choose_victim(running: RunningSet, sequence: Sequence) -> Sequence | None:
    """Who gives way to `sequence`; None when nobody behind it may be asked. One that frees nothing comes last."""
    behind = [s for s in running.sequences if s.order > sequence.order and not s.num_reserved]
    return min(behind, key=lambda s: _preference(running, s), default=None)


def make_room(running: RunningSet, sequence: Sequence, num_tokens: int, preempt: Preempt) -> bool:
    """Preempt until `sequence` can write its next `num_tokens` tokens; False when it had to give way itself.

    Each round asks anew: a victim that shared blocks with `sequence` saves it their copies as well.
    """
    while not running.has_room(sequence, num_tokens):
        victim = choose_victim(running, sequence)
        if victim is None:
            preempt(sequence, PreemptionReason.GAVE_WAY)
            return False
        preempt(victim, PreemptionReason.OUTRANKED)
    return True


def _preference(running: RunningSet, victim: Sequence) -> tuple[bool, int, int, int, int]:
    """Smaller gives way sooner: frees something, is less urgent, costs less, came later."""
    num_own, (priority, arrival, choice) = running.num_own_blocks(victim), victim.order
    return (num_own == 0, -priority, num_own, -arrival, -choice)
