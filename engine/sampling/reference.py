"""The sampler order in plain Python, one row at a time: the slow twin that the vectorised steps are tested against.

No torch, no batch, no state: everything follows from the parameters, the tokens so far and the logits. Never serves.
"""

import math
from collections.abc import Callable, Sequence

from engine.sampling.params import SamplingParams

_DROPPED = -math.inf

Logits = list[float]
_Step = Callable[[Logits, SamplingParams, Sequence[int], Sequence[int]], Logits]


def next_token(
    logits: Sequence[float],
    params: SamplingParams,
    key: tuple[int, int],
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> int | None:
    """The token that follows, from raw `logits` [vocab] and a noise key of two words; None when all are excluded."""
    edited = shaped(logits, params, prompt_ids, output_ids)
    if max(edited) == _DROPPED:
        return None
    ranked = edited if params.is_greedy else scores(edited, key)
    return ranked.index(max(ranked))


def scores(logits: Sequence[float], key: tuple[int, int]) -> list[float]:
    """How far each token of [vocab] comes in the race of this key: its logit plus its noise."""
    return [logit + noise(token_id, key) for token_id, logit in enumerate(logits)]


def noise(token_id: int, key: tuple[int, int]) -> float:
    """Gumbel noise: minus the log of an exponential number, from a hash of the token id under the key."""
    h = token_id * 0x9E3779B9 % 2**32 ^ key[0]
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15 ^ key[1]) * 0x846CA68B % 2**32
    h ^= (h >> 16) + (0xFFFF0000 if h >= 2**31 else 0)  # a shift that copies the top bit
    return -math.log(-math.log1p(-(h + 0.5) * 2.0**-31))


def shaped(
    logits: Sequence[float], params: SamplingParams, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
) -> Logits:
    """Logits [vocab] after all steps, -inf where a token was dropped; a greedy row takes the edits only."""
    edited = list(logits)
    for step in params.sampler_order:
        if not params.is_greedy or step in ("mask", "logit_bias", "penalties"):
            edited = _STEPS[step](edited, params, prompt_ids, output_ids)
    return edited


def probabilities(logits: Sequence[float]) -> list[float]:
    """Softmax of [vocab]."""
    peak = max(logits)
    weights = [math.exp(logit - peak) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def _mask(logits: Logits, params: SamplingParams, _: Sequence[int], output_ids: Sequence[int]) -> Logits:
    banned = set()
    if params.allowed_token_ids is not None:
        banned = set(range(len(logits))) - set(params.allowed_token_ids)
    if len(output_ids) < params.min_tokens:
        banned |= params.stop_token_ids
    for *prefix, last in params.bad_words_ids:
        if list(output_ids[len(output_ids) - len(prefix) :]) == prefix and len(prefix) <= len(output_ids):
            banned.add(last)
    return [_DROPPED if token_id in banned else logit for token_id, logit in enumerate(logits)]


def _logit_bias(logits: Logits, params: SamplingParams, *_: Sequence[int]) -> Logits:
    return [logit + params.logit_bias.get(token_id, 0.0) for token_id, logit in enumerate(logits)]


def _penalties(logits: Logits, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Logits:
    edited = list(logits)
    for token_id in {*prompt_ids, *output_ids}:
        repetition = params.repetition_penalty
        edited[token_id] = edited[token_id] / repetition if edited[token_id] > 0 else edited[token_id] * repetition
    for token_id in set(output_ids):
        count = list(output_ids).count(token_id)
        edited[token_id] -= count * params.frequency_penalty + params.presence_penalty
    return edited


def _temperature(logits: Logits, params: SamplingParams, *_: Sequence[int]) -> Logits:
    return [logit / params.temperature for logit in logits]


def _typical_p(logits: Logits, params: SamplingParams, *_: Sequence[int]) -> Logits:
    if params.typical_p == 1.0:
        return logits
    chances = probabilities(logits)
    surprisals = [-math.log(chance) if chance > 0.0 else math.inf for chance in chances]
    entropy = sum(chance * surprisal for chance, surprisal in zip(chances, surprisals, strict=True) if chance > 0.0)
    distances = [abs(surprisal - entropy) for surprisal in surprisals]
    mass = 0.0
    furthest = 0.0
    for token_id in sorted(range(len(logits)), key=distances.__getitem__):
        furthest = distances[token_id]
        mass += chances[token_id]
        if mass >= params.typical_p:
            break
    return [logit if distance <= furthest else _DROPPED for logit, distance in zip(logits, distances, strict=True)]


def _ranked(logits: Logits) -> list[int]:
    """Token ids, most likely first, the lower id first among equals."""
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def _only(logits: Logits, kept: Sequence[int]) -> Logits:
    return [logit if token_id in set(kept) else _DROPPED for token_id, logit in enumerate(logits)]


def _top_k(logits: Logits, params: SamplingParams, *_: Sequence[int]) -> Logits:
    return _only(logits, _ranked(logits)[: params.top_k]) if params.top_k else logits


def _top_p(logits: Logits, params: SamplingParams, *_: Sequence[int]) -> Logits:
    if params.top_p == 1.0:
        return logits
    chances = probabilities(logits)
    kept: list[int] = []
    mass = 0.0
    for token_id in _ranked(logits):
        kept.append(token_id)
        mass += chances[token_id]
        if mass >= params.top_p:
            break
    return _only(logits, kept)


def _min_p(logits: Logits, params: SamplingParams, *_: Sequence[int]) -> Logits:
    chances = probabilities(logits)
    floor = params.min_p * max(chances)
    return [logit if chance >= floor else _DROPPED for logit, chance in zip(logits, chances, strict=True)]


_STEPS: dict[str, _Step] = {
    "mask": _mask,
    "logit_bias": _logit_bias,
    "penalties": _penalties,
    "temperature": _temperature,
    "typical_p": _typical_p,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
}
