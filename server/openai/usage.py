"""Token counts and times of an answer, as its `usage`, `timings` and Server-Timing show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduler.handle import RequestHandle

if TYPE_CHECKING:
    from server.openai.generation import Generation


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's `usage`: each prompt counts once, however many choices it has."""
    plan = generation.plan
    num_prompt, num_output = plan.num_prompt_tokens, generation.num_output_tokens
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(handle.num_cached_tokens for handle in generation.handles)},
    }
    details: dict[str, int] = {}
    if plan.output.reports_reasoning:
        texts = [choice.text for choices in generation.choices for choice in choices]
        details["reasoning_tokens"] = sum(text.num_reasoning_tokens for text in texts)
    if plan.output.has_prediction:
        details |= {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    if details:
        counts["completion_tokens_details"] = details
    return counts


def timings(handles: Sequence[RequestHandle]) -> dict[str, float]:
    """Milliseconds spent waiting, on the prompt, and on the output; of several prompts the longest each."""
    parts = [_phases_ms(handle) for handle in handles]
    return {name: round(max(part[name] for part in parts), 3) for name in ("queue_ms", "prefill_ms", "decode_ms")}


def _phases_ms(handle: RequestHandle) -> dict[str, float]:
    times = handle.times
    end_s = times.finished_s or times.last_token_s or times.arrived_s
    scheduled_s = times.scheduled_s if times.scheduled_s is not None else end_s
    first_s = times.first_token_s if times.first_token_s is not None else end_s
    last_s = times.last_token_s if times.last_token_s is not None else first_s
    return {
        "queue_ms": (scheduled_s - times.arrived_s) * 1000,
        "prefill_ms": max(0.0, first_s - scheduled_s) * 1000,
        "decode_ms": max(0.0, last_s - first_s) * 1000,
    }


def server_timing(parts: dict[str, float]) -> str:
    """The value of a Server-Timing header."""
    return ", ".join(f"{name.removesuffix('_ms')};dur={value:.3f}" for name, value in parts.items())
