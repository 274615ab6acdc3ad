"""Prometheus metrics: an observer of the scheduler, a meter for the HTTP layer, and what `/metrics` answers.

Knows every metric's name, buckets and labels, in one table. Each value is kept once and shown twice: under its own
`quire_` name and, unless switched off, under vLLM's name, so that dashboards and routers written for vLLM work. Gauges
are read from the scheduler when a scrape asks, so they cannot go stale. No label value comes from a client.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

from kvpool.tier import TierStats
from scheduler.observer import NullObserver, RequestReport, StepReport
from scheduler.request import FinishReason, PreemptionReason, Request
from scheduler.stats import SchedulerStats
from server.instruments import Histogram, LabelledCount, counter_family, gauge_family, histogram_family

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_TOKEN_BUCKETS = (1.0, *(float(2**power) for power in range(3, 15)))

FINISH_WORDS = frozenset({"stop", "length", "tool_calls", "cancelled", "deadline", "failed", "none"})
_VLLM_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.FAILED: "error",
}
# Of a request with several choices the gravest end is counted, so that it stays one request.
_GRAVITY = (
    FinishReason.FAILED,
    FinishReason.DEADLINE,
    FinishReason.CANCELLED,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


@dataclass(frozen=True, slots=True)
class ModelLabels:
    """What is served, for the info metrics and the labels of vLLM's names."""

    model_name: str
    dtype: str
    device: str
    max_model_len: int
    block_size: int
    num_blocks: int
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class _Timing:
    """A histogram under its own name and, where vLLM has one, its name there."""

    histogram: Histogram
    name: str
    alias: str
    help: str


class Metrics(NullObserver):
    """All instruments of one server. Satisfies the scheduler's `Observer` and the HTTP layer's `Meter`."""

    def __init__(self, *, version: str, vllm_names: bool = True) -> None:
        self._version = version
        self._vllm_names = vllm_names
        self._model: ModelLabels | None = None
        self._stats: Callable[[], SchedulerStats] | None = None

        self._requests = LabelledCount("endpoint", "status", "finish_reason")
        self._key_requests = LabelledCount("key")
        self._key_tokens = LabelledCount("key", "kind")
        self._finished = LabelledCount("finish_reason")
        self._preemption_reasons = LabelledCount("reason")
        self._vllm_finished = LabelledCount("finished_reason")
        self._counts = dict.fromkeys((name for name, _, _ in _COUNTERS), 0)

        self._ttft = Histogram(TTFT_BUCKETS)
        self._itl = Histogram(TOKEN_BUCKETS)
        self._tpot = Histogram(TOKEN_BUCKETS)
        self._duration, self._queue = Histogram(REQUEST_BUCKETS), Histogram(REQUEST_BUCKETS)
        self._prefill, self._decode = Histogram(REQUEST_BUCKETS), Histogram(REQUEST_BUCKETS)
        self._prompt_length, self._output_length = Histogram(LENGTH_BUCKETS), Histogram(LENGTH_BUCKETS)
        self._step_tokens = Histogram(STEP_TOKEN_BUCKETS)
        self._step_seconds = {phase: Histogram(STEP_BUCKETS) for phase in ("plan", "engine", "commit")}

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def attach(self, model: ModelLabels, stats: Callable[[], SchedulerStats]) -> None:
        """A model is served from now on: gauges come from `stats` at each scrape."""
        self._model, self._stats = model, stats

    # ---------------------------------------------------------------------------------- what the scheduler tells

    def on_step(self, report: StepReport) -> None:
        """Count a step's tokens and the time of its three phases."""
        self._step_tokens.observe(report.num_prefill_tokens + report.num_decode_tokens)
        self._counts["quire_generation_tokens"] += report.num_output_tokens
        self._step_seconds["plan"].observe(report.plan_s)
        self._step_seconds["engine"].observe(report.engine_s)
        self._step_seconds["commit"].observe(report.commit_s)

    def on_first_token(self, request: Request, ttft_s: float) -> None:
        """Record the time to first token; the whole prompt has been computed by now."""
        self._ttft.observe(ttft_s)
        self._counts["quire_prompt_tokens"] += len(request.prompt_ids)

    def on_token_gap(self, gap_s: float, num_tokens: int) -> None:
        """Record the inter-token latency of `num_tokens` tokens that arrived together."""
        if num_tokens > 0:
            self._itl.observe(gap_s / num_tokens, num_tokens)

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count looked-up and found prompt tokens."""
        self._counts["quire_prefix_cache_queried_tokens"] += num_queried_tokens
        self._counts["quire_prefix_cache_hit_tokens"] += num_hit_tokens

    def on_preemption(self, request: Request, reason: PreemptionReason) -> None:
        """Count a preemption, in all and by reason."""
        self._counts["quire_preemptions"] += 1
        self._preemption_reasons.add(reason.value)

    def on_request_end(self, report: RequestReport) -> None:
        """Record how a request ended, its lengths, and the times of those parts that it reached."""
        reason = next(reason for reason in _GRAVITY if reason in report.finish_reasons)
        self._finished.add(reason.value)
        self._vllm_finished.add(_VLLM_FINISH[reason])
        num_prompt_tokens = len(report.request.prompt_ids)
        self._prompt_length.observe(num_prompt_tokens)
        self._output_length.observe(report.num_output_tokens)
        times = report.times
        if times.first_token_s is None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._counts["quire_prompt_tokens"] += num_prompt_tokens  # scored only: no token ever came
        if times.finished_s is not None:
            self._duration.observe(times.finished_s - times.arrived_s)
        if times.scheduled_s is not None:
            self._queue.observe(times.scheduled_s - times.arrived_s)
            if times.first_token_s is not None:
                self._prefill.observe(times.first_token_s - times.scheduled_s)
        if times.first_token_s is not None and times.last_token_s is not None:
            self._observe_decode(times.last_token_s - times.first_token_s, report)

    def _observe_decode(self, decode_s: float, report: RequestReport) -> None:
        self._decode.observe(decode_s)
        num_later_tokens = report.num_output_tokens / report.request.num_choices - 1
        if num_later_tokens > 0:
            self._tpot.observe(decode_s / num_later_tokens)

    # --------------------------------------------------------------------------------- what the HTTP layer tells

    def request_ended(self, endpoint: str, status: int, finish_reason: str, key: str) -> None:
        """Put one HTTP request into its one cell (see `server.state.Meter`)."""
        word = finish_reason if finish_reason in FINISH_WORDS else "none"
        self._requests.add(endpoint, str(status), word)
        if key:
            self._key_requests.add(key)

    def tokens_used(self, key: str, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """Charge tokens to the key named `key`; nothing without one."""
        if key:
            self._key_tokens.add(key, "prompt", count=num_prompt_tokens)
            self._key_tokens.add(key, "completion", count=num_completion_tokens)

    # ------------------------------------------------------------------------------------------- what is scraped

    def render(self) -> tuple[bytes, str]:
        """Everything in Prometheus' text format 0.0.4, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape: own names first, then vLLM's."""
        stats = self._stats() if self._stats is not None else None
        yield from self._own_info()
        if stats is not None:
            yield from self._own_gauges(stats)
        for name, _, about in _COUNTERS:
            yield counter_family(name, about, [((), self._counts[name])])
        yield from self._own_labelled()
        for timing in self._timings():
            yield histogram_family(timing.name, timing.help, [({}, timing.histogram)])
        phases = [({"phase": phase}, histogram) for phase, histogram in self._step_seconds.items()]
        yield histogram_family("quire_step_seconds", "Time of one step by phase, in seconds.", phases, ("phase",))
        if self._vllm_names and self._model is not None and stats is not None:
            yield from self._vllm(self._model, stats)

    def _timings(self) -> tuple[_Timing, ...]:
        return tuple(_Timing(getattr(self, attribute), *names) for attribute, *names in _HISTOGRAMS)

    def _own_info(self) -> Iterator[Metric]:
        yield gauge_family("quire_build_info", "Version of the server.", [((self._version,), 1)], ("version",))
        if self._model is not None:
            model = self._model
            values = (model.model_name, model.dtype, model.device, str(model.max_model_len), str(model.block_size))
            names = ("model_name", "dtype", "device", "max_model_len", "block_size")
            yield gauge_family("quire_model_info", "What is served.", [(values, 1)], names)
            yield gauge_family("quire_weight_bytes", "Memory of the weights.", [((), model.weight_bytes)])
            kv_bytes = [((), model.kv_bytes_per_token)]
            yield gauge_family("quire_kv_bytes_per_token", "Memory of one token's keys and values.", kv_bytes)

    def _own_gauges(self, stats: SchedulerStats) -> Iterator[Metric]:
        pool = stats.pool
        for name, about, value in (
            ("quire_requests_running", "Sequences that take part in steps.", stats.num_running),
            ("quire_requests_waiting", "Sequences that wait to run.", stats.num_waiting),
            ("quire_waiting_tokens", "Prompt tokens of waiting sequences.", stats.num_waiting_tokens),
            ("quire_drain_tokens_per_second", "Measured rate of computed tokens.", stats.drain_tokens_per_s),
            ("quire_step_running_seconds", "Age of the step in flight; 0 when idle.", stats.step_running_s or 0.0),
            ("quire_engine_up", "1 while the engine can run steps.", float(stats.unhealthy is None)),
            ("quire_kv_usage_ratio", "Share of KV blocks that requests hold.", pool.usage),
        ):
            yield gauge_family(name, about, [((), value)])
        blocks = [(("free",), pool.num_free), (("cached",), pool.num_cached), (("referenced",), pool.num_referenced)]
        yield gauge_family("quire_kv_blocks", "KV blocks by state.", blocks, ("state",))
        yield counter_family("quire_kv_evictions", "Cached KV blocks that were reused.", [((), pool.evictions)])
        yield gauge_family("quire_kv_pinned_blocks", "KV blocks that cache keys keep.", [((), stats.num_pinned_blocks)])
        if stats.tiers:
            yield from self._own_tiers(stats.tiers)

    def _own_tiers(self, tiers: Sequence[TierStats]) -> Iterator[Metric]:
        for name, about, attribute in (
            ("quire_kv_tier_blocks", "KV blocks behind the cache.", "num_blocks"),
            ("quire_kv_tier_bytes", "Their bytes.", "num_bytes"),
        ):
            yield gauge_family(name, about, [((tier.name,), getattr(tier, attribute)) for tier in tiers], ("tier",))
        for name, about, attribute in (
            ("quire_kv_tier_stored_blocks", "KV blocks written behind the cache.", "num_stored"),
            ("quire_kv_tier_loaded_blocks", "KV blocks read back.", "num_loaded"),
            ("quire_kv_tier_failed_blocks", "KV blocks that could not be written or read.", "num_failed"),
        ):
            yield counter_family(name, about, [((tier.name,), getattr(tier, attribute)) for tier in tiers], ("tier",))

    def _own_labelled(self) -> Iterator[Metric]:
        for name, about, count in (
            ("quire_requests", "HTTP requests by route, status sent and how the answer ended.", self._requests),
            ("quire_finished_requests", "Requests that left the scheduler, by reason.", self._finished),
            ("quire_preemptions_by_reason", "Preemptions, by what caused them.", self._preemption_reasons),
            ("quire_key_requests", "Requests by configured API key name.", self._key_requests),
            ("quire_key_tokens", "Tokens by configured API key name.", self._key_tokens),
        ):
            yield counter_family(name, about, count.cells(), count.label_names)

    def _vllm(self, model: ModelLabels, stats: SchedulerStats) -> Iterator[Metric]:
        names, values = ("model_name", "engine"), (model.model_name, "0")
        for name, about, value in (
            ("vllm:num_requests_running", "Requests in model execution batches.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests waiting to be processed.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", stats.pool.usage),
        ):
            yield gauge_family(name, about, [(values, value)], names)
        shape = (*values, str(model.block_size), str(model.num_blocks))
        shape_names = (*names, "block_size", "num_gpu_blocks")
        yield gauge_family("vllm:cache_config_info", "Shape of the KV cache.", [(shape, 1)], shape_names)
        for own, alias, about in _COUNTERS:
            yield counter_family(alias, about, [(values, self._counts[own])], names)
        finished = [((*values, *cell), count) for cell, count in self._vllm_finished.cells()]
        yield counter_family(
            "vllm:request_success", "Finished requests by reason.", finished, (*names, "finished_reason")
        )
        labels = dict(zip(names, values, strict=True))
        for timing in self._timings():
            yield histogram_family(timing.alias, timing.help, [(labels, timing.histogram)], names)


# own name, vLLM's name, help; without the `_total` that counters get
_COUNTERS = (
    ("quire_preemptions", "vllm:num_preemptions", "Running sequences that lost their blocks."),
    ("quire_prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of requests that were computed."),
    ("quire_generation_tokens", "vllm:generation_tokens", "Generated tokens."),
    ("quire_prefix_cache_queried_tokens", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("quire_prefix_cache_hit_tokens", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
)

# attribute, own name, vLLM's name, help
_HISTOGRAMS = (
    ("_ttft", "quire_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "Arrival to first token."),
    ("_itl", "quire_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", "Gap between tokens."),
    (
        "_tpot",
        "quire_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "Mean gap between the tokens of one request.",
    ),
    ("_duration", "quire_request_seconds", "vllm:e2e_request_latency_seconds", "Arrival to end of a request."),
    ("_queue", "quire_request_queue_seconds", "vllm:request_queue_time_seconds", "Arrival to first step."),
    ("_prefill", "quire_request_prefill_seconds", "vllm:request_prefill_time_seconds", "First step to first token."),
    ("_decode", "quire_request_decode_seconds", "vllm:request_decode_time_seconds", "First token to last token."),
    ("_prompt_length", "quire_request_prompt_tokens", "vllm:request_prompt_tokens", "Prompt tokens of a request."),
    ("_output_length", "quire_request_output_tokens", "vllm:request_generation_tokens", "Output tokens of a request."),
    ("_step_tokens", "quire_step_tokens", "vllm:iteration_tokens_total", "Tokens computed in one step."),
)
