"""When all that waits now should have begun: what a client hears that finds the queue full.

Knows an `Outlook`, as `scheduler.predict` does, and says roughly what that plays out step by step: a refusal has to be
cheap, and refusals come in storms. O(n log n) in the sequences ahead.

    slot 0   running ....|    waiting 1 ...............|  waiting 4 ..
    slot 1   running ...........|  waiting 2 ....|  waiting 3 ........
                                                 |         |
                              the last has begun +         + the turn of who would come behind them
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from scheduler.predict import Load, Outlook


def turn_s(outlook: Outlook) -> float | None:
    """Seconds until a request behind all that wait now would begin; None when no step was ever measured.

    Each sequence keeps its place for as many steps as it has chunks to compute and tokens to give (those that the
    forecast expects, no more than it may); a place that is given back goes to the first in the queue. The time follows
    from the steps and tokens until then, at what they were measured to cost.
    """
    times = outlook.times
    if times is None:
        return None
    everyone = (*outlook.running, *outlook.waiting)
    num_places = _num_places(outlook, everyone)
    num_chunk_tokens = max(1, outlook.num_step_tokens - num_places)
    ends = [_num_steps(load, num_chunk_tokens) for load in outlook.running]
    ends += [0.0] * (num_places - len(ends))
    heapify(ends)
    for load in outlook.waiting:
        heapreplace(ends, ends[0] + _num_steps(load, num_chunk_tokens))
    num_gap_tokens = sum(load.num_gap for load in everyone)
    num_steps = max(ends[0], num_gap_tokens / num_chunk_tokens if outlook.waiting else 0.0)
    num_output_tokens = min(ends[0] * num_places, sum(load.num_output for load in everyone))
    return outlook.step_left_s + num_steps * times.base_s + (num_gap_tokens + num_output_tokens) * times.token_s


def _num_steps(load: Load, num_chunk_tokens: int) -> float:
    """Steps from its first to its last: the one that closes the gap gives the first output token."""
    return (load.num_gap - 1) / num_chunk_tokens + max(1, load.num_output)


def _num_places(outlook: Outlook, everyone: Sequence[Load]) -> int:
    """How many run at once: as many as have slots, or as the pool holds to the end of their answers."""
    num_held = sum(load.num_held + load.num_output for load in everyone)
    num_fitting = outlook.num_pool_tokens * len(everyone) // num_held if num_held else outlook.num_slots
    return max(1, len(outlook.running), min(outlook.num_slots, num_fitting))
