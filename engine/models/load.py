"""From a `ModelSource` to a running `Decoder`, and what else its files say about generating.

The only place that knows both file formats. Nothing is printed: progress goes to a callback.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from engine.config import Progress
from engine.errors import LoadError
from engine.models.allocate import empty_decoder
from engine.models.decoder import Decoder
from engine.models.families import spec_from_gguf, spec_from_hf_config
from engine.models.native_decoder import NativeDecoder
from engine.models.packed import QUANTIZED_BITS, PackedParameters
from engine.models.parameters import DenseParameters, Parameters
from engine.models.spec import DecoderSpec
from engine.native import find_native
from engine.weights.assign import assign
from engine.weights.checkpoint import Checkpoint, ModelSource
from engine.weights.safetensors import SafetensorsCheckpoint

__all__ = ["load_decoder", "read_checkpoint_dtype", "read_generation_config", "read_spec", "weight_bytes_of"]

_PHASE = "loading weights"
_HF_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GGUF_DTYPES = {0: torch.float32, 1: torch.float16}
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_spec(source: ModelSource) -> DecoderSpec:
    """What kind of model the files hold; reads no weights.

    Raises:
        LoadError: no or a damaged configuration, or a model that is not supported.
    """
    try:
        if source.kind == "gguf":
            return spec_from_gguf(source.gguf_header)
        return spec_from_hf_config(_read_json(source.path / "config.json"))
    except LoadError as error:
        raise _naming(source, error) from error


def load_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    max_model_len: int | None = None,
    quantization: str = "auto",
) -> Decoder:
    """Load a model: allocate its weights on `device`, then read them in place, tensor by tensor.

    On a CPU with native kernels the weights are packed (see `engine.models.packed`) and everything is computed in
    float32; elsewhere weights are plain tensors of `dtype`.

    Args:
        dtype: what float weights are rounded to, and the KV cache holds; without native kernels also what is computed
            in. Packed weights that float32 holds without loss in fewer bits are kept in these.
        quantization: as `EngineConfig` describes it.
        progress: told the share of the weights that is in place, and before that whether kernels are being compiled.
        max_model_len: the longest sequence that will be served, in tokens; dynamic rotary scaling is fixed for it.
            None is the model's `default_context`.

    Raises:
        LoadError: an unsupported model, a missing, extra, misshapen or damaged tensor (names it), or a quantization
            that cannot be had here.
    """
    spec = read_spec(source)
    packs = _packs(device, quantization, progress)
    progress(_PHASE, 0.0)
    try:
        with _open_checkpoint(source, spec) as checkpoint:
            parameters: Parameters = DenseParameters(dtype, device)
            if packs:
                parameters = PackedParameters(checkpoint, quantization, device, dtype)
            decoder = empty_decoder(spec, parameters, max_model_len or spec.default_context)
            assign(checkpoint, parameters.places, spec.tie_word_embeddings, lambda done: progress(_PHASE, done))
        if isinstance(parameters, PackedParameters):
            parameters.choose_heights()
    except LoadError as error:
        raise _naming(source, error) from error
    return NativeDecoder.of(decoder) if packs else decoder


def weight_bytes_of(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    quantization: str = "auto",
) -> int:
    """Bytes that the weights will take at most, as `load_decoder` would store them; allocates and reads none.

    Raises:
        LoadError: as `load_decoder`, as far as the files' headers tell.
    """
    spec, nowhere = read_spec(source), torch.device("meta")
    parameters: Parameters = DenseParameters(dtype, nowhere)
    if _packs(device, quantization, progress):
        with _open_checkpoint(source, spec) as checkpoint:
            parameters = PackedParameters(checkpoint, quantization, nowhere, dtype)
            return empty_decoder(spec, parameters, 1).weight_bytes
    return empty_decoder(spec, parameters, 1).weight_bytes


def _packs(device: torch.device, quantization: str, progress: Progress) -> bool:
    """Whether weights are packed for the native kernels."""
    if device.type == "cpu" and find_native(progress) is not None:
        return True
    if quantization in QUANTIZED_BITS:
        raise LoadError(
            f"quantization {quantization!r} needs the native CPU kernels; here it is {device}"
            + (", and there are no kernels" if device.type == "cpu" else "")
        )
    return False


def read_checkpoint_dtype(source: ModelSource) -> torch.dtype:
    """The dtype that `auto` stands for: the files' own, and bfloat16 for quantized ones.

    Raises:
        LoadError: the configuration cannot be read.
    """
    if source.kind == "gguf":
        embedding = source.gguf_header.tensors.get("token_embd.weight")
        return _GGUF_DTYPES.get(embedding.ggml_type, torch.bfloat16) if embedding else torch.bfloat16
    config = _read_json(source.path / "config.json")
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return _HF_DTYPES.get(named.removeprefix("torch."), torch.bfloat16)


def read_generation_config(source: ModelSource) -> dict[str, Any]:
    """The model's sampling defaults, under transformers' names; `eos_token_id` is always there, as a list of ids.

    Raises:
        LoadError: a file is damaged.
    """
    if source.kind == "gguf":
        return _gguf_generation_config(source.gguf_header.metadata)
    path = source.path / "generation_config.json"
    settings = _read_json(path) if path.is_file() else {}
    eos = settings.get("eos_token_id")
    if eos is None:
        eos = _read_json(source.path / "config.json").get("eos_token_id")
    return {**settings, "eos_token_id": _as_list(eos)}


def _gguf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's converter stores sampling defaults as `general.sampling.*`, where the source model had any."""
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in _GGUF_EOS_KEYS]
    settings: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for key, name in _GGUF_SAMPLING_KEYS.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            settings[name] = value
    return settings


def _open_checkpoint(source: ModelSource, spec: DecoderSpec) -> AbstractContextManager[Checkpoint]:
    if source.kind == "gguf":
        from engine.weights.gguf import GGUFCheckpoint  # needs the gguf package, which no other format does

        return nullcontext(GGUFCheckpoint(source.gguf_header, spec.head_dim))
    return SafetensorsCheckpoint(source.path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: not a JSON object")
    return value


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _naming(source: ModelSource, error: LoadError) -> LoadError:
    """The same error, saying which model it is about."""
    message = str(error)
    return LoadError(message if str(source.path) in message else f"{source.path}: {message}")
