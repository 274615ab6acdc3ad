"""From a checked body to a `Plan`: the part that chat and completions share.

Decides lengths, deadlines, namespaces and notes; renders nothing (see `conversation`) and queues nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.sampling.constraint import Constraint
from kvpool.prefix import namespace_root
from scheduler.request import Request
from server.config import ServerConfig
from server.errors import ApiError, bad_request, context_exceeded
from server.openai.notes import Notes
from server.openai.plan import Job, LogprobStyle, OutputPlan, Plan, StreamStyle
from server.openai.schema.common import CommonFields
from server.openai.settings import (
    SeedSource,
    Setting,
    check_token_ids,
    effective_settings,
    sampling_params,
)
from server.state import Served
from server.text.choice import TextOptions
from server.text.replies import ReplySite

SLO_HEADER = "x-slo-ttft-ms"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an HTTP request brings besides its body: its id, when it came (scheduler's clock), its TTFT goal in ms."""

    request_id: str
    now_s: float
    slo_ttft_ms: int | None = None

    @classmethod
    def of(cls, request_id: str, headers: Mapping[str, str], now_s: float) -> "Arrival":
        """Read the headers. Raises ApiError (400) when the goal is no positive whole number."""
        given = headers.get(SLO_HEADER)
        if given is None:
            return cls(request_id, now_s)
        if not (given.isascii() and given.isdigit() and len(given) < 16 and int(given) > 0):
            raise bad_request(f"The header {SLO_HEADER} must be a positive number of milliseconds.", SLO_HEADER)
        return cls(request_id, now_s, int(given))


@dataclass(frozen=True, slots=True)
class Target:
    """What a request runs on."""

    served: Served
    config: ServerConfig
    seeds: SeedSource

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and output of one choice may have: the model's context, or the pool if that is less."""
        pool_tokens = self.served.scheduler.stats().pool.num_blocks * self.config.block_size
        return min(self.served.max_model_len, pool_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the text they were made of (None: they came as ids), and where an answer's tokens are remembered."""

    token_ids: Sequence[int]
    text: str | None = None
    reply_site: ReplySite | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A body in the terms that chat and completions share.

    Attributes:
        prompts: each prompt, before truncation.
        prompt_param: the field that prompts came from, for errors.
        max_tokens: wanted output length with its source; None for all that is left.
        max_tokens_param: the field it came from, for warnings.
        num_drawn: choices drawn per prompt.
        scores_choices: choices are ranked, so each token's logprob is needed.
    """

    prompts: Sequence[Prompt]
    prompt_param: str
    max_tokens: Setting | None
    num_drawn: int
    scores_choices: bool
    constraint: Constraint | None
    max_tokens_param: str = "max_tokens"


def check_model(name: str | None, served: Served) -> None:
    """Refuse a model that is not served; no name is the one model there is. Raises ApiError (404)."""
    if name is not None and name not in served.model_names:
        raise model_not_found(name)


def model_not_found(name: str) -> ApiError:
    """A 404 that names the model."""
    return ApiError(404, f"The model {name!r} does not exist on this server.", "model", "model_not_found")


def notes_on(body: CommonFields, target: Target) -> Notes:
    """What of a body has no effect here.

    Raises:
        ApiError: 404 for a model that is not served, 400 for such fields where they are refused.
    """
    check_model(body.model, target.served)
    config, notes = target.config, Notes(strict=target.config.strict_params)
    notes.unknown(dict(body.unknown_fields()))
    for name in ("user", "safety_identifier"):
        if getattr(body, name) is not None:
            notes.ignored(name, getattr(body, name), "this server keeps no records of end users")
    if body.store:
        notes.ignored("store", True, "answers are not stored")
    if body.metadata:
        notes.ignored("metadata", body.metadata, "answers are not stored")
    if body.service_tier not in (None, "auto", "default"):
        notes.ignored("service_tier", body.service_tier, "there is one tier only")
    if body.prompt_cache_key is not None and not config.prefix_pin_budget:
        notes.ignored("prompt_cache_key", body.prompt_cache_key, "this server pins no prefixes")
    if body.priority and config.scheduling_policy != "priority":
        notes.ignored("priority", body.priority, "this server runs requests in order of arrival")
    return notes


def text_options(body: CommonFields, *, show_special_tokens: bool = False) -> TextOptions:
    """How output text is made; `show_special_tokens` overrides the body, for routers that look for them."""
    return TextOptions(
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not show_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def stream_style(body: CommonFields) -> StreamStyle | None:
    """What the stream carries; None without one. Raises ApiError (400) for options without a stream."""
    if not body.stream:
        if body.stream_options is not None:
            raise bad_request("stream_options can only be used together with stream.", "stream_options")
        return None
    options = body.stream_options
    if options is None:
        return StreamStyle()
    return StreamStyle(
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        obfuscate=bool(options.include_obfuscation),
    )


def logprob_style(body: CommonFields, num_top: int | None, param: str, max_logprobs: int) -> LogprobStyle | None:
    """How logprobs are written; `num_top` None for none. Raises ApiError (400) above the server's limit."""
    for name, value in ((param, num_top), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and value > max_logprobs:
            raise bad_request(f"{name} must be at most {max_logprobs}, got {value}.", name)
    if num_top is None:
        if body.logprob_token_ids is not None:
            raise bad_request("logprob_token_ids can only be used together with logprobs.", "logprob_token_ids")
        return None
    return LogprobStyle(num_top, tuple(body.logprob_token_ids or ()), bool(body.return_tokens_as_token_ids))


def build_plan(
    body: CommonFields, ask: Ask, output: OutputPlan, arrival: Arrival, target: Target, notes: Notes
) -> Plan:
    """Put a plan together.

    Raises:
        ApiError, ParamError: something does not fit the model.
    """
    served = target.served
    settings = effective_settings(body, served.generation_defaults, target.config, target.seeds)
    num_logprobs = output.logprobs.num_top if output.logprobs else 0 if ask.scores_choices else None
    num_prompt = _num_prompt_logprobs(output)
    params = sampling_params(body, settings, served, num_logprobs, num_prompt)
    jobs, granted = [], []
    for index, prompt in enumerate(ask.prompts):
        prompt_ids, max_tokens = _fit(body, prompt.token_ids, ask, target, notes)
        granted.append(max_tokens)
        request = Request(
            request_id=arrival.request_id if len(ask.prompts) == 1 else f"{arrival.request_id}-{index}",
            prompt_ids=prompt_ids,
            sampling=params,
            max_tokens=max_tokens,
            num_choices=ask.num_drawn,
            priority=body.priority or 0,
            deadline_s=arrival.now_s + body.timeout_ms / 1000 if body.timeout_ms else None,
            queue_deadline_s=_queue_deadline(body, arrival, target.config),
            cache_namespace=cache_namespace(body, served),
            cache_scope=namespace_root(*served.namespace),
            explain_cache=output.explain is not None,
            use_prefix_cache=num_prompt is None,
            pin_key=body.prompt_cache_key,
            constraint=ask.constraint,
        )
        is_whole = len(prompt_ids) == len(prompt.token_ids)
        own = (prompt.text, prompt.reply_site) if is_whole else (None, None)
        jobs.append(Job(request, index * ask.num_drawn, *own))
    settings["max_tokens"] = _granted(granted, ask.max_tokens)
    return Plan(
        jobs=tuple(jobs),
        output=output,
        stream=stream_style(body),
        model=body.model or served.model_name,
        report={name: setting.shown() for name, setting in settings.items()},
        warnings=tuple(notes.warnings),
        headers=notes.headers(),
    )


def cache_namespace(body: CommonFields, served: Served) -> bytes:
    """What keeps this request's KV apart from that of others: the model with all that shapes its KV, and the salt."""
    return namespace_root(*served.namespace, body.cache_salt or "")


def _num_prompt_logprobs(output: OutputPlan) -> int | None:
    """Alternatives the engine reports per prompt token: for `prompt_logprobs`, for an echo with logprobs, or both."""
    echoed = output.logprobs.num_top if output.echo_prompt and output.logprobs else None
    wanted = [value for value in (output.num_prompt_logprobs, echoed) if value is not None]
    return max(wanted) if wanted else None


def _granted(granted: list[int], wanted: Setting | None) -> Setting:
    """What `sampling.max_tokens` shows: one number, or one per prompt where they differ."""
    clamped = wanted is None or any(value != wanted.value for value in granted)
    value: Any = granted[0] if len(set(granted)) == 1 else granted
    return Setting(value, "model" if clamped else wanted.source if wanted else "model")


def _queue_deadline(body: CommonFields, arrival: Arrival, config: ServerConfig) -> float | None:
    """When the request must have begun: the field, else the header, else the server's own bound."""
    wait_ms = body.queue_timeout_ms or arrival.slo_ttft_ms
    if wait_ms is not None:
        return arrival.now_s + wait_ms / 1000
    return None if config.queue_timeout is None else arrival.now_s + config.queue_timeout


def _fit(
    body: CommonFields, raw_ids: Sequence[int], ask: Ask, target: Target, notes: Notes
) -> tuple[tuple[int, ...], int]:
    """The prompt as it will run and the output tokens granted to it.

    Raises:
        ApiError: an empty prompt, foreign token ids, or a prompt that leaves no room.
    """
    param, limit = ask.prompt_param, target.context_limit
    if not raw_ids:
        raise bad_request("The prompt has no tokens; there is nothing to continue.", param)
    check_token_ids(raw_ids, param, target.served.vocab_size)
    prompt_ids = _truncated(body, raw_ids, limit, ask, notes)
    room = limit - len(prompt_ids)
    only_scores = ask.max_tokens is not None and ask.max_tokens.value == 0
    if room < (0 if only_scores else 1):
        raise context_exceeded(len(prompt_ids), limit, param)
    wanted = room if ask.max_tokens is None else int(ask.max_tokens.value)
    if wanted > room:
        why = f"{len(prompt_ids)} prompt tokens leave {room} of the context's {limit}"
        notes.changed(ask.max_tokens_param, wanted, room, why)
    granted = min(wanted, room)
    if (body.min_tokens or 0) > granted:
        raise bad_request(f"min_tokens ({body.min_tokens}) is more than the {granted} tokens granted.", "min_tokens")
    return prompt_ids, granted


def _truncated(body: CommonFields, ids: Sequence[int], limit: int, ask: Ask, notes: Notes) -> tuple[int, ...]:
    """The last tokens of the prompt, if the request asked for that."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tuple(ids)
    if keep == 0:
        raise bad_request("truncate_prompt_tokens must be -1 or at least 1.", "truncate_prompt_tokens")
    if keep == -1:
        wanted = ask.max_tokens.value if ask.max_tokens else 1
        keep = max(1, limit - min(wanted, limit - 1))
    if len(ids) > keep:
        notes.changed(ask.prompt_param, len(ids), keep, "truncate_prompt_tokens: only the last tokens were kept")
    return tuple(ids[-keep:])
