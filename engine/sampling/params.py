"""How to choose tokens: one frozen, validated value per request. Torch-free; the scheduler and server build it.

The order in which the fields act is `SAMPLER_ORDER`; `engine.sampling.pipeline` carries it out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

SAMPLER_ORDER: tuple[str, ...] = (
    "mask",  # 1. allowed / banned tokens, bad words, minimum length, grammar mask
    "logit_bias",  # 2. added to the raw logits
    "penalties",  # 3. repetition (prompt and output), then frequency and presence (output)
    "temperature",  # 4. logits / temperature; 0 means greedy: the highest logit after steps 1-3
    "typical_p",  # 5. locally typical sampling (Meister et al. 2022)
    "top_k",  # 6. the k highest
    "top_p",  # 7. nucleus (Holtzman et al. 2019)
    "min_p",  # 8. at least min_p times the highest probability (Nguyen et al. 2024)
)
"""The default sampler order; the draw always comes last. `mask` always comes first."""

MAX_LOGPROBS = 20


def check_sampler_order(order: tuple[str, ...]) -> tuple[str, ...]:
    """`order` itself when it is a permutation of `SAMPLER_ORDER` that begins with `mask`; else ValueError."""
    if sorted(order) != sorted(SAMPLER_ORDER) or order[0] != "mask":
        raise ValueError(f"sampler order must begin with mask and name each of {', '.join(SAMPLER_ORDER)} once")
    return order


class ParamError(ValueError):
    """A sampling field out of range. `param` is the field's name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _empty() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen sampling settings of one request. Defaults are neutral: the model's own distribution.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        repetition_penalty: over prompt and output tokens (Keskar et al. 2019); 1 is off.
        frequency_penalty, presence_penalty: over output tokens, as OpenAI defines them.
        seed: the draw of output token `i` of choice `c` depends on (seed, c, i) and the logits alone.
        min_tokens: `stop_token_ids` cannot be drawn before that many output tokens.
        stop_token_ids: tokens that end the output (the model's end tokens included, unless ignored by the caller).
        logit_bias: token id -> added to its logit.
        allowed_token_ids: None allows all.
        bad_words_ids: token sequences that may not appear in the output.
        logprobs: None for none, else how many most likely alternatives to report beside the chosen token (0 or more).
        prompt_logprobs: the same for prompt tokens.
        logprob_token_ids: report these tokens' logprobs at each output position, besides the alternatives.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=_empty)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    sampler_order: tuple[str, ...] = SAMPLER_ORDER

    def __post_init__(self) -> None:
        self._check("temperature", 0.0, 2.0)
        self._check("top_p", 0.0, 1.0, open_low=True)
        self._check("min_p", 0.0, 1.0)
        self._check("typical_p", 0.0, 1.0, open_low=True)
        self._check("repetition_penalty", 0.0, math.inf, open_low=True)
        self._check("frequency_penalty", -2.0, 2.0)
        self._check("presence_penalty", -2.0, 2.0)
        if self.top_k < 0:
            raise ParamError("top_k", f"top_k must be 0 (off) or at least 1, got {self.top_k}")
        if self.min_tokens < 0:
            raise ParamError("min_tokens", f"min_tokens must be at least 0, got {self.min_tokens}")
        if not -(2**63) <= self.seed < 2**63:
            raise ParamError("seed", "seed must fit a signed 64-bit integer")
        for token_id, bias in self.logit_bias.items():
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise ParamError("logit_bias", f"logit_bias of token {token_id} must be within -100..100, got {bias}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParamError("allowed_token_ids", "allowed_token_ids must not be empty")
        if any(not word for word in self.bad_words_ids):
            raise ParamError("bad_words", "bad_words must not hold an empty word")

    def _check(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        below = value <= low if open_low else value < low
        if not math.isfinite(value) or below or value > high:
            bounds = f"{'above' if open_low else 'at least'} {low:g}"
            bounds += "" if high == math.inf else f" and at most {high:g}"
            raise ParamError(name, f"{name} must be {bounds}, got {value}")

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken instead of drawing."""
        return self.temperature == 0.0
