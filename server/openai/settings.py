"""The sampling settings really used, each with where it came from: the request, the model, or this server.

Knows the order of precedence and the ranges that depend on the model. The settings become the engine's `SamplingParams`
and, unchanged, the `sampling` field of the answer.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.sampling.params import SamplingParams
from server.config import ServerConfig
from server.errors import bad_request
from server.openai.schema.common import CommonFields
from server.state import Served

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""What is used when neither request nor model says anything."""

SEED_BITS = 31  # fits every client's integers


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source: request, model or server."""

    value: Any
    source: str

    def shown(self) -> dict[str, Any]:
        """As the answer shows it."""
        return {"value": self.value, "source": self.source}


class SeedSource:
    """Seeds for requests that bring none; the same server seed gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> int:
        """A fresh seed."""
        return self._random.getrandbits(SEED_BITS)


def effective_settings(
    body: CommonFields, defaults: Mapping[str, Any], config: ServerConfig, seeds: SeedSource
) -> dict[str, Setting]:
    """Every setting that decides the draw, in the order they are shown."""
    settings = {name: _setting(name, getattr(body, name), defaults) for name in NEUTRAL}
    if settings["top_k"].value < 0:
        settings["top_k"] = Setting(0, settings["top_k"].source)
    settings["seed"] = Setting(body.seed, "request") if body.seed is not None else Setting(seeds.next(), "server")
    settings["sampler_order"] = Setting(list(config.sampler_order), "server")
    return settings


def _setting(name: str, given: Any, defaults: Mapping[str, Any]) -> Setting:
    if given is not None:
        return Setting(given, "request")
    if defaults.get(name) is not None:
        return Setting(defaults[name], "model")
    return Setting(NEUTRAL[name], "server")


def sampling_params(
    body: CommonFields,
    settings: Mapping[str, Setting],
    served: Served,
    num_logprobs: int | None,
    num_prompt: int | None,
) -> SamplingParams:
    """The engine's form of the settings.

    `num_logprobs` and `num_prompt` are how many alternatives to report per output and prompt token (None: no logprobs).

    Raises:
        ApiError, ParamError: a value outside what this model allows.
    """
    return SamplingParams(
        **{name: settings[name].value for name in NEUTRAL},
        seed=settings["seed"].value,
        sampler_order=tuple(settings["sampler_order"].value),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=_stop_token_ids(body, served),
        logit_bias=_logit_bias(body.logit_bias or {}, served.vocab_size),
        allowed_token_ids=_ids(body.allowed_token_ids, "allowed_token_ids", served) if body.allowed_token_ids else None,
        bad_words_ids=_bad_words(body.bad_words or [], served),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt,
        logprob_token_ids=_ids(body.logprob_token_ids or (), "logprob_token_ids", served),
    )


def _ids(ids: Iterable[int], param: str, served: Served) -> tuple[int, ...]:
    ids = tuple(ids)
    check_token_ids(ids, param, served.vocab_size)
    return ids


def check_token_ids(ids: Iterable[int], param: str, vocab_size: int) -> None:
    """Refuse ids that the model does not have. Raises ApiError (400)."""
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise bad_request(f"{param}: token id {wrong} is not in the vocabulary (0..{vocab_size - 1}).", param)


def _stop_token_ids(body: CommonFields, served: Served) -> frozenset[int]:
    given = _ids(body.stop_token_ids or (), "stop_token_ids", served)
    return frozenset(given) | (frozenset() if body.ignore_eos else served.stop_token_ids)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> Mapping[int, float]:
    by_id = {int(key): value for key, value in bias.items()}
    check_token_ids(by_id, "logit_bias", vocab_size)
    return MappingProxyType(by_id)


def _bad_words(words: Iterable[str], served: Served) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the beginning of a text and after a space."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            spellings[tuple(served.tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(spelling for spelling in spellings if spelling)
