"""What is to be expected, learnt from what was: how long answers become, what they hold at their peak, who still comes.

Knows lengths, tokens, moments; no blocks or tables. A sequence that has given `n` tokens is expected to give as
many as the median of those recent answers that were longer than `n`, and never more than it may: each may well give
more, but it is their sum that counts. What a set of sequences needs at its peak follows if each grows by a token a step
and gives everything back at its end:

    tokens held   after the last one has ended: 0           growth: how many tokens each should still give
        |    __         peak, just before one of them ends
        |  _/  \\_      peak = max over i of (tokens of the i longest-lasting) + i * (growth of the i-th)
        |_/      \\__   (the longest-lasting first; Gong et al. 2025, "Past-Future Scheduler", estimate the same peak)
        +----------- steps
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.observer import NullObserver, RequestReport
from scheduler.request import FinishReason
from scheduler.sequence import Sequence

WINDOW = 256
"""How many recent answers are remembered."""

QUANTILE = 0.5
"""Of the answers longer than what a sequence has given: how many are to be no longer than expected."""

MIN_ANSWERS = 8
PRIOR_TOKENS = 32
"""What a sequence should still give, before `MIN_ANSWERS` answers have been seen."""

SPAN_S = 20.0
"""Arrivals are expected to go on as in the last two spans of so many seconds."""

MAX_ARRIVALS = 512
"""How many are remembered. More in two spans make the spans shorter."""

_NATURAL_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(frozen=True, slots=True)
class Holding:
    """Tokens whose KV a sequence alone holds, and by how many it should still grow before it gives them all back."""

    num_tokens: int
    num_growth: int


def peak_tokens(holdings: Iterable[Holding]) -> int:
    """The most that these hold at one time."""
    peak = total = 0
    for count, holding in enumerate(sorted(holdings, key=lambda h: h.num_growth, reverse=True), 1):
        total += holding.num_tokens
        peak = max(peak, total + count * holding.num_growth)
    return peak


class LengthForecast(NullObserver):
    """The lengths of recent answers, and what they say about those under way."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def on_request_end(self, report: RequestReport) -> None:
        """Remember how long the answer became, unless it was cut off by something else than its own end."""
        if _NATURAL_ENDS.issuperset(report.finish_reasons):
            self.observe(round(report.num_output_tokens / len(report.finish_reasons)))

    def observe(self, num_tokens: int) -> None:
        """Remember the length of one answer; the oldest is forgotten."""
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def growth(self, sequence: Sequence, quantile: float = QUANTILE) -> int:
        """Output tokens that a sequence should still give."""
        return min(self.expected(sequence.num_output, quantile), sequence.num_left)

    def expected(self, num_output: int, quantile: float = QUANTILE) -> int:
        """Tokens that should follow `num_output` ones: an answer longer than all before is expected to double."""
        if len(self._sorted) < MIN_ANSWERS:
            return PRIOR_TOKENS
        longer = bisect_right(self._sorted, num_output)
        num_longer = len(self._sorted) - longer
        if not num_longer:
            return max(1, num_output)
        return self._sorted[longer + int(quantile * (num_longer - 1))] - num_output


class ArrivalMeter(NullObserver):
    """How often requests come, and how much there is to compute of each.

    A crowd that came at one moment is no reason to expect another. So time is looked at in two spans, the last and the
    one before: where one of them saw more than twice as many as the other, only those count that came in the lesser.
    """

    def __init__(self, span_s: float = SPAN_S) -> None:
        self._span_s = span_s
        self._arrivals_s: deque[float] = deque(maxlen=MAX_ARRIVALS)
        self._tokens: deque[int] = deque(maxlen=WINDOW)

    def on_arrival(self, now_s: float) -> None:
        """Count a request that was taken."""
        self._arrivals_s.append(now_s)

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Remember what the prefix cache left of a prompt."""
        self._tokens.append(num_queried_tokens - num_hit_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt that are to be computed, on average."""
        return max(1, round(sum(self._tokens) / len(self._tokens))) if self._tokens else 1

    def interval_s(self, now_s: float) -> float | None:
        """Seconds from one arrival to the next; None when nobody is expected."""
        span_s = self._span_s
        if len(self._arrivals_s) == MAX_ARRIVALS:
            span_s = min(span_s, (now_s - self._arrivals_s[0]) / 2)
        num_recent = sum(now_s - moment_s <= span_s for moment_s in self._arrivals_s)
        num_before = sum(span_s < now_s - moment_s <= 2 * span_s for moment_s in self._arrivals_s)
        fewer = min(num_recent, num_before)
        is_steady = max(num_recent, num_before) <= 2 * fewer
        num_expected = (num_recent + num_before) / 2 if is_steady else fewer
        return span_s / num_expected if num_expected else None
