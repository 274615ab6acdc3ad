"""The same model as a GGUF file of another encoding, so that two servers can read the very same weights.

Matrices take the encoding asked for, vectors stay float32. What is read is decoded to float32 first; what it was
quantized from is not known, so a form made here is a model of its own, near the one it came from.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QType
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from tqdm import tqdm

from bench.random_model import extended_tokens
from engine.weights.gguf_header import read_gguf_header

Values = npt.NDArray[np.float32]
_FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
}
_FROM_READER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert_gguf(source: Path, target: Path, form: str) -> None:
    """Write the model of `source` to `target` with its matrices as `form`; everything else stays."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(_FILE_TYPES[form])
    for name, field in reader.fields.items():
        if name not in _FROM_READER:
            writer.add_key_value(name, field.contents(), *field.types[:2])
    tensors = ((tensor.name, _decoded(tensor)) for tensor in reader.tensors)
    _write(writer, tensors, len(reader.tensors), form)


def _decoded(tensor: gguf.ReaderTensor) -> Values:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    values: Values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    return values.reshape(shape)


def convert_folder(source: Path, tokenizer_source: Path, target: Path, form: str) -> None:
    """Write a folder made by `bench.random_model` as GGUF; its tokenizer is that of the GGUF file it was made with."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_file_type(_FILE_TYPES[form])
    add_sizes(writer, config, config["rope_theta"])
    _add_tokenizer(writer, read_gguf_header(tokenizer_source).metadata, config["vocab_size"])
    with safe_open(source / "model.safetensors", "pt") as file:
        names = list(file.keys())
        tensors = ((gguf_name(name), file.get_tensor(name).float().numpy()) for name in names)
        _write(writer, tensors, len(names), form)


def add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any], rope_theta: float) -> None:
    """What every model's metadata holds, from the names that a folder's `config.json` has for it."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, metadata: Mapping[str, Any], vocab_size: int) -> None:
    types = metadata["tokenizer.ggml.token_type"]
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(extended_tokens(metadata, vocab_size))
    writer.add_token_types([*types, *[int(gguf.TokenType.NORMAL)] * (vocab_size - len(types))])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(metadata["tokenizer.chat_template"])


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _write(writer: gguf.GGUFWriter, tensors: Iterator[tuple[str, Values]], num: int, form: str) -> None:
    qtype = QType[form.upper()]
    for name, values in tqdm(tensors, total=num, desc=f"encoding as {form}", unit="tensor"):
        if values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values))
        elif qtype is QType.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, quantize(values, qtype), raw_dtype=qtype)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
