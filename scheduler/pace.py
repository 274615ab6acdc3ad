"""How much of a step prompts may take while others stream, so that a long prompt does not stall every stream.

Knows what steps were measured to take; knows no sequences and no blocks. A step beside streams may take as long as

    undisturbed time of the streams * (1 + share)       share = max(stretch - 1, 4 * (num_reading - 1) / num_streams)

One prompt that comes alone gets `stretch - 1` of the streams' own time. In a crowd, who waits for a first token weighs
four times as much as who waits for a next one: a burst is not held up by the first few of it that stream already.

The undisturbed time is measured by leaving a step undisturbed: when nothing is known, when the number of streams has
doubled or halved since, and once in a while. What a prompt's token costs is followed closely, as it grows with context.
"""

from dataclasses import dataclass, replace

from scheduler.observer import NullObserver, StepReport
from scheduler.predict import StepClock, StepTimes

MEMORY_STEPS = 50.0
"""Undisturbed steps that the fit of their time looks back on."""
MAX_DISTURBED = 64
"""Steps with prompt tokens in a row, until one is left undisturbed."""
CROWD_WEIGHT = 4.0
"""Of a sequence that reads its prompt behind another, against one that streams."""
MAX_TOKENS = 1 << 30
"""More than any step's budget."""
NEWEST_WEIGHT = 0.25
"""Of a step's cost per prompt token, in the running mean."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known at one moment. `stream_times` are those of undisturbed steps, by number of streams."""

    stretch: float
    stream_times: StepTimes
    prompt_token_s: float | None = None

    def num_prompt_tokens(self, num_streams: int, num_reading: int) -> int:
        """Prompt tokens that a step may compute beside `num_streams`, for `num_reading` sequences; at least one.

        Before it was ever measured, a prompt's token is taken to cost what a stream's does.
        """
        share = max(self.stretch - 1.0, CROWD_WEIGHT * (num_reading - 1) / num_streams)
        spare_s = share * self.stream_times.of(num_streams)
        token_s = self.prompt_token_s
        if token_s is None:
            token_s = self.stream_times.of(num_streams) / num_streams
        return max(1, int(spare_s / token_s)) if token_s > 0.0 else MAX_TOKENS


class PaceMeter(NullObserver):
    """Learns a `Pace` from the steps it sees. `stretch` None sets no limit and learns nothing."""

    def __init__(self, stretch: float | None) -> None:
        self.pace: Pace | None = None
        self._stretch = stretch
        self._clock = StepClock(MEMORY_STEPS)
        self._num_measured = 0
        self._num_disturbed = 0
        self._prompt_token_s: float | None = None

    def num_prompt_tokens(self, num_streams: int, num_reading: int) -> int | None:
        """Of the step to be planned; None for no limit, 0 for a step that is to be left undisturbed."""
        if self._stretch is None or not num_streams or not num_reading:
            return None
        if self.pace is None or self._num_disturbed >= MAX_DISTURBED or self._is_unlike(num_streams):
            return 0
        return self.pace.num_prompt_tokens(num_streams, num_reading)

    def on_step(self, report: StepReport) -> None:
        """Take in one step."""
        if self._stretch is None:
            return
        if report.num_prefill_tokens:
            self._num_disturbed += 1
            self._learn_cost(report)
        else:
            self._num_disturbed, self._num_measured = 0, report.num_decode_tokens
            self._clock.on_step(report)
            times = self._clock.times
            assert times is not None, "a step was seen"
            self.pace = Pace(self._stretch, times, self._prompt_token_s)

    def _is_unlike(self, num_streams: int) -> bool:
        return not self._num_measured // 2 <= num_streams <= self._num_measured * 2

    def _learn_cost(self, report: StepReport) -> None:
        """From a step with prompt tokens: what it took beyond its streams' own time."""
        seconds = report.plan_s + report.engine_s + report.commit_s
        if report.num_decode_tokens:
            if self.pace is None:
                return
            seconds -= self.pace.stream_times.of(report.num_decode_tokens)
        newest = max(0.0, seconds) / report.num_prefill_tokens
        known = self._prompt_token_s
        self._prompt_token_s = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        if self.pace is not None:
            self.pace = replace(self.pace, prompt_token_s=self._prompt_token_s)
