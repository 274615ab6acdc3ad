"""Rotary settings as checkpoints write them, in `config.json` or in GGUF metadata, to a `RopeSpec`. Torch-free.

Knows both vocabularies and their defaults; what the settings mean is `engine.models.rope`'s business.
"""

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import LoadError
from engine.models.fields import real, whole
from engine.models.spec import RopeSpec

_DEFAULT_THETA = 10_000.0


def rope_from_hf_config(config: Mapping[str, Any]) -> RopeSpec:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Raises:
        LoadError: a scaling that is not supported, or a number that is missing or out of range.
    """
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise LoadError("rotary settings that differ between layer types are not supported")
    _refuse_partial(settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = real(settings, "rope_theta", real(config, "rope_theta", _DEFAULT_THETA))
    trained = whole(config, "max_position_embeddings")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, factor=real(settings, "factor"))
    if kind == "dynamic":
        return RopeSpec("dynamic", theta, factor=real(settings, "factor"), original_context=trained)
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    if kind == "llama3":
        return _llama3(settings, theta, int(original or trained))
    if kind == "yarn":
        return _yarn(settings, theta, int(original or trained), trained)
    raise LoadError(f"rotary scaling {kind!r} is not supported (default, linear, dynamic, llama3 and yarn are)")


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, frequency_factors: tuple[float, ...]
) -> RopeSpec:
    """From the `<architecture>.rope.*` keys; `frequency_factors` are the values of `rope_freqs.weight`, if any.

    Raises:
        LoadError: as `rope_from_hf_config`.
    """
    settings = {
        key.removeprefix(f"{architecture}.rope."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.rope.")
    }
    _refuse_partial(real(settings, "dimension_count", head_dim) / head_dim)
    theta = real(settings, "freq_base", _DEFAULT_THETA)
    factor = settings.get("scaling.factor") or settings.get("scale_linear") or 1.0
    kind = settings.get("scaling.type", "linear")
    if frequency_factors:
        if kind != "none" and factor != 1.0:
            raise LoadError(f"rope_freqs.weight together with rotary scaling {kind!r} is not supported")
        if len(frequency_factors) != head_dim // 2:
            raise LoadError(f"rope_freqs.weight has {len(frequency_factors)} values, {head_dim // 2} are needed")
        return RopeSpec("factors", theta, frequency_factors=frequency_factors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, factor=float(factor))
    if kind == "yarn":
        trained = whole(metadata, f"{architecture}.context_length")
        return _gguf_yarn(settings, theta, float(factor), trained)
    raise LoadError(f"rotary scaling {kind!r} is not supported in GGUF files (none, linear and yarn are)")


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """`0.1 * scale * ln(factor) + 1`, or 1 without stretching (YaRN, Peng et al. 2023, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(settings: Mapping[str, Any], theta: float, original: int) -> RopeSpec:
    low, high = real(settings, "low_freq_factor"), real(settings, "high_freq_factor")
    if low >= high:
        raise LoadError(f"rotary scaling: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeSpec(
        "llama3",
        theta,
        factor=real(settings, "factor"),
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(settings: Mapping[str, Any], theta: float, original: int, trained: int) -> RopeSpec:
    """The attention factor is given, or the quotient of the two mscales (DeepSeek's form), or the paper's."""
    factor = real(settings, "factor", trained / original)
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        scale, scale_all = settings.get("mscale"), settings.get("mscale_all_dim")
        attention_factor = yarn_attention_factor(factor)
        if scale and scale_all:
            attention_factor = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, scale_all)
    return RopeSpec(
        "yarn",
        theta,
        factor=factor,
        original_context=original,
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        truncate=bool(settings.get("truncate", True)),
        attention_factor=float(attention_factor),
    )


def _gguf_yarn(settings: Mapping[str, Any], theta: float, factor: float, trained: int) -> RopeSpec:
    """llama.cpp multiplies the paper's attention factor by the stored ones (1 when absent)."""
    stored = real(settings, "scaling.attn_factor", 1.0) * real(settings, "scaling.yarn_attn_factor", 1.0)
    return RopeSpec(
        "yarn",
        theta,
        factor=factor,
        original_context=int(settings.get("scaling.original_context_length") or trained),
        beta_fast=real(settings, "scaling.yarn_beta_fast", 32.0),
        beta_slow=real(settings, "scaling.yarn_beta_slow", 1.0),
        attention_factor=stored * yarn_attention_factor(factor),
    )


def _refuse_partial(share: float) -> None:
    if share != 1.0:
        raise LoadError(f"partial rotary embedding ({share:g} of each head) is not supported")
