"""Writes a folder made by `tiny_models` as a GGUF file, the way llama.cpp's converter does, row order included."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType
from safetensors.torch import load_file

from bench.gguf_forms import add_sizes, finish, gguf_name


def write_gguf(
    folder: Path,
    path: Path,
    *,
    qtype: QType | Callable[[str], QType] = QType.F32,
    metadata: Mapping[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
) -> Path:
    """Convert the model of `folder`; matrices become `qtype` where their rows are whole blocks, the rest stays float32.

    `qtype` may depend on the tensor's GGUF name.
    `metadata` adds keys below the architecture's prefix, such as `{"rope.scaling.type": "yarn"}`.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = "llama" if config["model_type"] in ("llama", "mistral") else config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder)
    for key, value in (metadata or {}).items():
        _add(writer, f"{architecture}.{key}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _permute(values, config["head_dim"])
        own_name = gguf_name(name)
        _add_tensor(writer, own_name, values, qtype if isinstance(qtype, QType) else qtype(own_name))
    finish(writer)
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    add_sizes(writer, config, config["rope_parameters"]["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    special = {token["content"] for token in data["added_tokens"] if token["special"]}
    tokens = sorted({**vocab, **{token["content"]: token["id"] for token in data["added_tokens"]}}.items(), key=_second)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = dict(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t, _ in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]])
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.exists() else settings["chat_template"])


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    adders[type(value)](key, value)


def _permute(values: np.ndarray, head_dim: int) -> np.ndarray:
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, qtype: QType) -> None:
    block_size, _ = gguf.GGML_QUANT_SIZES[qtype]
    if values.ndim == 1 or values.shape[-1] % block_size or qtype == QType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
