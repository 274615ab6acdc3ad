"""The model families served, from a checkpoint's own words to a `DecoderSpec`. Torch-free.

Llama (and SmolLM2), Mistral, Qwen2 and Qwen3, each a row of a table: what differs between them is a handful of
switches. Whatever a checkpoint asks for that the decoder cannot do is refused here, by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import LoadError
from engine.models.fields import real, whole
from engine.models.rope_config import rope_from_gguf, rope_from_hf_config
from engine.models.spec import DecoderSpec
from engine.weights.gguf_header import GGUFHeader, read_float32_tensor


@dataclass(frozen=True, slots=True)
class HFFamily:
    """One `model_type`.

    Attributes:
        architecture: the class named in `architectures`; another one has another head.
        defaults: values that transformers assumes when `config.json` leaves them out.
        qkv_bias: None follows `attention_bias`, which then also decides about the output projection.
        mlp_bias: whether the family has the switch `mlp_bias`.
        windows: whether layers may have a sliding window.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: bool = True


_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
HF_FAMILIES: Mapping[str, HFFamily] = {
    "llama": HFFamily("LlamaForCausalLM", mlp_bias=True, windows=False),
    "mistral": HFFamily("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}, qkv_bias=False),
    "qwen2": HFFamily("Qwen2ForCausalLM", {"num_key_value_heads": 32, **_QWEN_WINDOWS}, qkv_bias=True),
    "qwen3": HFFamily("Qwen3ForCausalLM", {"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS}, qk_norm=True),
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral and SmolLM2 files say `llama`."""


def spec_from_hf_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The specification that a `config.json` describes.

    Raises:
        LoadError: an unknown family, or something the decoder cannot do; names it.
    """
    family = _hf_family(config)
    config = {**family.defaults, **config}
    _refuse_hf(config)
    num_layers, num_heads = whole(config, "num_hidden_layers"), whole(config, "num_attention_heads")
    hidden_size = whole(config, "hidden_size")
    attention_bias = bool(config.get("attention_bias", False)) if family.qkv_bias is None else family.qkv_bias
    return _checked_spec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=whole(config, "num_key_value_heads", num_heads),
        head_dim=whole(config, "head_dim", hidden_size // num_heads),
        intermediate_size=whole(config, "intermediate_size"),
        vocab_size=whole(config, "vocab_size"),
        max_position_embeddings=whole(config, "max_position_embeddings"),
        rms_norm_eps=real(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=rope_from_hf_config(config),
        sliding_window=_hf_windows(config, family, num_layers),
    )


def spec_from_gguf(header: GGUFHeader) -> DecoderSpec:
    """The specification that a GGUF file's metadata and tensor list describe.

    Biases and an own head are there when their tensors are: the metadata has no word for them.

    Raises:
        LoadError: as `spec_from_hf_config`.
    """
    architecture, tensors = header.architecture, header.tensors
    if architecture not in GGUF_ARCHITECTURES:
        raise LoadError(f"GGUF architecture {architecture!r} is not supported ({', '.join(GGUF_ARCHITECTURES)} are)")
    values = _gguf_values(header)
    num_layers, num_heads = whole(values, "block_count"), whole(values, "attention.head_count")
    hidden_size = whole(values, "embedding_length")
    head_dim = whole(values, "attention.key_length", hidden_size // num_heads)
    window = whole(values, "attention.sliding_window", 0, minimum=0) or None
    factors = read_float32_tensor(tensors["rope_freqs.weight"]) if "rope_freqs.weight" in tensors else ()
    return _checked_spec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=whole(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=whole(values, "feed_forward_length"),
        vocab_size=_gguf_vocab_size(header),
        max_position_embeddings=whole(values, "context_length"),
        rms_norm_eps=real(values, "attention.layer_norm_rms_epsilon", 1e-6),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=architecture == "qwen3",
        rope=rope_from_gguf(header.metadata, architecture, head_dim, factors),
        sliding_window=(window,) * num_layers,
    )


def _checked_spec(**fields: Any) -> DecoderSpec:
    try:
        return DecoderSpec(**fields)
    except ValueError as error:
        raise LoadError(f"the model's configuration is inconsistent: {error}") from error


def _hf_family(config: Mapping[str, Any]) -> HFFamily:
    model_type = config.get("model_type")
    family = HF_FAMILIES.get(str(model_type))
    if family is None:
        raise LoadError(f"model type {model_type!r} is not supported ({', '.join(HF_FAMILIES)} are)")
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise LoadError(f"architecture {', '.join(architectures)} is not supported ({family.architecture} is)")
    return family


def _refuse_hf(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise LoadError(f"activation {activation!r} is not supported (silu is)")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise LoadError(f"safetensors quantized with {method!r} are not supported")


def _hf_windows(config: Mapping[str, Any], family: HFFamily, num_layers: int) -> tuple[int | None, ...]:
    """Qwen slides from layer `max_window_layers` on, Mistral everywhere; explicit `layer_types` win over both."""
    layer_types = config.get("layer_types") or _default_layer_types(config, family, num_layers)
    if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
        raise LoadError(f"attention of type {min(unknown)!r} is not supported")
    if not family.windows and "sliding_attention" in layer_types:
        raise LoadError(f"{family.architecture} with sliding_attention layers is not supported")
    window = None
    if family.windows and config.get("use_sliding_window", True) and config.get("sliding_window") is not None:
        window = whole(config, "sliding_window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _default_layer_types(config: Mapping[str, Any], family: HFFamily, num_layers: int) -> list[str]:
    first = whole(config, "max_window_layers", 0, minimum=0) if family.windows else num_layers
    return ["full_attention" if index < first else "sliding_attention" for index in range(num_layers)]


def _gguf_values(header: GGUFHeader) -> Mapping[str, Any]:
    """The architecture's own keys without their prefix, after refusing what the decoder cannot do."""
    prefix = f"{header.architecture}."
    values = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if values.get("expert_count"):
        raise LoadError(f"mixture of experts ({values['expert_count']} experts) is not supported")
    if values.get("attention.value_length", values.get("attention.key_length")) != values.get("attention.key_length"):
        raise LoadError("values and keys of different head sizes are not supported")
    return values


def _gguf_vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError("tensor token_embd.weight is missing")
    return embedding.shape[0]
