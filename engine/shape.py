"""What of a model decides how much memory it takes, from its configuration alone: no weights, no torch.

Knows configurations and how this engine keeps weights; knows nothing of devices, pools or users.
"""

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

from engine.errors import LoadError
from engine.models.families import spec_from_gguf, spec_from_hf_config
from engine.models.spec import DecoderSpec
from engine.quant.groups import GROUP_SIZE, largest_group
from engine.weights.checkpoint import ModelSource, resolve_model

WEIGHT_BITS = MappingProxyType(
    {
        "float32": (Fraction(32), Fraction(32)),
        "bfloat16": (Fraction(16), Fraction(16)),
        "float16": (Fraction(16), Fraction(16)),
        "int8": (Fraction(17, 2), Fraction(17, 2)),
        "int4": (Fraction(5), Fraction(17, 2)),
        "int4_g128": (Fraction(17, 4), Fraction(17, 2)),
    }
)
"""Bits of a parameter, and of one in the vocabulary's matrices, as `engine.models.packed` keeps them: groups of 32 (or
128) share a half-float scale, with 4 bits a minimum too; embedding and head keep 8 bits."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's size.

    Attributes:
        num_vocab_parameters: those of embedding and head, among `num_parameters`; 0 when unknown.
        max_context: tokens of one sequence at most; None when unknown.
        group_size: what `int4_g128` comes down to where rows are not whole groups of 128.
    """

    name: str
    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_vocab_parameters: int = 0
    max_context: int | None = None
    group_size: int = 128

    def weight_bytes(self, kind: str) -> int:
        """Bytes of the weights kept as one of `WEIGHT_BITS`, rounded up."""
        bits, vocab_bits = WEIGHT_BITS[kind]
        if kind == "int4_g128":
            bits = Fraction(4) + Fraction(32, self.group_size)
        num_others = self.num_parameters - self.num_vocab_parameters
        return -(-(num_others * bits + self.num_vocab_parameters * vocab_bits) // 8)


def read_shape(model: str | None) -> ModelShape:
    """The shape of a folder's or a GGUF file's model, the embedded one (None), or a hub id, whose config alone is read.

    Raises:
        LoadError: there is no such model, or it is not supported.
    """
    if model is not None and not Path(model).expanduser().exists():
        return shape_of(spec_from_hf_config(_hub_config(model)), model)
    source = resolve_model(model)
    return shape_of(_read_spec(source), source.name)


def shape_of(spec: DecoderSpec, name: str) -> ModelShape:
    """The shape of a model that is specified."""
    num_vocab = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    num_layer = _attention_parameters(spec) + _mlp_parameters(spec) + 2 * spec.hidden_size
    return ModelShape(
        name=name,
        num_parameters=num_vocab + spec.num_layers * num_layer + spec.hidden_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_vocab_parameters=num_vocab,
        max_context=spec.max_context,
        group_size=_smallest_group(spec),
    )


def _smallest_group(spec: DecoderSpec) -> int:
    """Of the matrices' inputs; what is no whole groups at all is not quantized and costs more than any group says."""
    widths = (spec.hidden_size, spec.query_size, spec.intermediate_size)
    return min((largest_group(width) for width in widths if width % GROUP_SIZE == 0), default=GROUP_SIZE)


def _attention_parameters(spec: DecoderSpec) -> int:
    num_outputs = spec.query_size + 2 * spec.kv_size
    matrices = spec.hidden_size * (num_outputs + spec.query_size)
    biases = num_outputs * spec.qkv_bias + spec.hidden_size * spec.output_bias
    return matrices + biases + 2 * spec.head_dim * spec.qk_norm


def _mlp_parameters(spec: DecoderSpec) -> int:
    biases = (2 * spec.intermediate_size + spec.hidden_size) * spec.mlp_bias
    return 3 * spec.hidden_size * spec.intermediate_size + biases


def _read_spec(source: ModelSource) -> DecoderSpec:
    if source.kind == "gguf":
        return spec_from_gguf(source.gguf_header)
    return spec_from_hf_config(_read_json(source.path / "config.json"))


def _hub_config(model_id: str) -> dict[str, object]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return _read_json(Path(hf_hub_download(model_id, "config.json")))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(f"model {model_id!r}: no such file or folder here, and not from the hub: {reason}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} must hold a JSON object")
    return content
