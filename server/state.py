"""What every route reads: the settings, the phase of life, and the served model once there is one.

`ServerState` is the only mutable value and only its own methods change it; `Served` is frozen and complete. Knows no
routes, no HTTP, and does not load anything: `server.build` assembles a `Served` and hands it over with `set_ready`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from kvpool.layout import KVLayout
    from scheduler.loop import Scheduler
    from server.config import ServerConfig
    from server.limits import KeyRing
    from server.text.own_template import OwnTemplates
    from server.text.replies import ReplyMemory
    from server.text.structured import StructuredCompiler
    from server.text.template import ChatTemplate
    from server.text.tokenizer import Tokenizer
    from server.text.tools.check import ToolCheck
    from server.text.tools.dialect import ToolDialect


class Phase(StrEnum):
    """Where a server is in its life. Only READY takes new requests; only READY and DRAINING run any."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Meter(Protocol):
    """What the HTTP layer reports; `server.metrics.Metrics` is one."""

    def request_ended(self, endpoint: str, status: int, finish_reason: str, key: str) -> None:
        """An HTTP request ended.

        `endpoint` is the route's template ("/v1/models/{model_id}"; "unknown" for no route), `status` the one sent
        (499 when the client left before any), `finish_reason` "stop", "length", "tool_calls", "cancelled", "deadline",
        "failed", or "none" where nothing was generated, `key` the key's configured name, "" without one.
        """

    def tokens_used(self, key: str, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """A request of the key named `key` ("" without one) used these tokens."""

    def render(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and the content type."""


@dataclass(frozen=True)
class Served:
    """A loaded model and everything needed to turn a request body into an answer.

    Attributes:
        model_names: the names clients may ask for; the first one is shown in answers.
        created: Unix time in whole seconds.
        template: None when the model has no chat template; chat is then refused.
        own_templates: renders templates that requests bring.
        tool_dialect: how this model writes and reads tool calls.
        tool_check: refuses tools that are none.
        reasoning: name of the reasoning parser, None for none.
        generation_defaults: sampling defaults of the model's `generation_config.json` (temperature, top_p, ...).
        stop_token_ids: the tokens that end an answer unless `ignore_eos`.
        namespace: the fixed parts of the prefix-cache namespace (model, tokenizer, template, KV dtype, ...).
        fingerprint: `system_fingerprint` of every answer.
        dtype: of the computation, for operators.
        kv_layout, kv_dtype: of the KV cache, for operators.
        clock: the scheduler's; deadlines are on it.
        replies: tokens of earlier answers, for later turns; None when they are not kept.
    """

    model_names: tuple[str, ...]
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    own_templates: OwnTemplates
    scheduler: Scheduler
    structured: StructuredCompiler
    tool_dialect: ToolDialect
    tool_check: ToolCheck
    reasoning: str | None
    generation_defaults: Mapping[str, Any]
    stop_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    namespace: tuple[str, ...]
    fingerprint: str
    dtype: str
    kv_layout: KVLayout
    kv_dtype: str
    clock: Clock = field(default_factory=MonotonicClock)
    replies: ReplyMemory | None = None

    @property
    def model_name(self) -> str:
        """The name shown in answers."""
        return self.model_names[0]


class ServerState:
    """Settings, phase and the served model. Lives on the event loop; other threads may call `set_loading`.

    The settings of `config` that the HTTP layer reads: max_request_bytes, allowed_origins, strict_params, max_logprobs,
    sampler_order, seed, queue_timeout, sse_keep_alive_interval, shutdown_timeout, max_num_queued_reqs,
    scheduling_policy, trust_request_chat_template. `keys` is `KeyRing.load(config.api_key, config.api_key_file)`.
    """

    def __init__(self, config: ServerConfig, metrics: Meter, keys: KeyRing) -> None:
        self.config = config
        self.metrics = metrics
        self.keys = keys
        self.started_at = time.time()  # Unix seconds
        self._origin_s = time.monotonic()
        self._phase = Phase.STARTING
        self._detail = ""
        self._fraction = 0.0
        self._served: Served | None = None

    @property
    def phase(self) -> Phase:
        """Where the server is in its life."""
        return self._phase

    @property
    def phase_detail(self) -> str:
        """What is being loaded, or why the server failed; empty when there is nothing to say."""
        return self._detail

    @property
    def phase_fraction(self) -> float:
        """How much of the loading step named by `phase_detail` is done, 0..1."""
        return self._fraction

    @property
    def served(self) -> Served | None:
        """The loaded model; None until ready."""
        return self._served

    @property
    def uptime_s(self) -> float:
        """Seconds since the process began to serve."""
        return time.monotonic() - self._origin_s

    def set_loading(self, detail: str, fraction: float = 0.0) -> None:
        """A loading step goes on; fits `engine.config.Progress`."""
        if self._phase in (Phase.STARTING, Phase.LOADING):
            self._enter(Phase.LOADING, detail, fraction)

    def set_ready(self, served: Served) -> None:
        """Serve `served` from now on."""
        self._served = served
        self._enter(Phase.READY)

    def set_draining(self) -> None:
        """Take nothing new; what runs is finished."""
        self._enter(Phase.DRAINING)

    def set_failed(self, reason: str) -> None:
        """Loading failed or the engine died: `reason` is shown to operators and clients."""
        self._enter(Phase.FAILED, reason)

    def _enter(self, phase: Phase, detail: str = "", fraction: float = 0.0) -> None:
        self._phase, self._detail, self._fraction = phase, detail, fraction
