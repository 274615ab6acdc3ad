"""GGUF: the header against the gguf library's own reader, every tensor type against its own dequantize."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import no_progress
from engine.errors import LoadError
from engine.models.load import (
    load_decoder,
    read_checkpoint_dtype,
    read_generation_config,
    read_spec,
    weight_bytes_of,
)
from engine.models.rope import rope_frequencies
from engine.models.spec import RopeSpec
from engine.weights.checkpoint import resolve_model
from engine.weights.gguf import GGUFCheckpoint
from engine.weights.gguf_header import GGUFHeader, GGUFTensorInfo, read_gguf_header
from engine.weights.names import canonical_name
from tests.fakes.naive_attention import naive_logits
from tests.fakes.tiny_gguf import write_gguf
from tests.fakes.tiny_models import make_tiny_model

CPU = torch.device("cpu")
PROMPT = [(5 * index * index + 1) % 288 for index in range(40)]
Quant = gguf.GGMLQuantizationType


def read(checkpoint: GGUFCheckpoint, name: str) -> torch.Tensor:
    target = torch.full(checkpoint.shape(name), torch.nan)
    checkpoint.copy_into(name, target)
    return target


def check_header(path: Path) -> GGUFHeader:
    """Our header equals what the gguf library reads, key by key and tensor by tensor."""
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    own = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(own)
    for key, field in own.items():
        assert header.metadata[key] == field.contents(), key
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.ggml_type, info.offset_bytes) == (tensor.tensor_type, tensor.data_offset)
    return header


def test_header_equals_the_library_reader(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "höher \U0001f680\n")
    writer.add_string("a.empty", "")
    writer.add_array("a.words", ["", "é", "zwei Wörter"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1e30])
    writer.add_array("a.flags", [True, False])
    writer.add_custom_alignment(64)
    writer.add_tensor("one", np.arange(7, dtype=np.float32))
    writer.add_tensor("two", np.arange(12, dtype=np.float16).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = check_header(tmp_path / "m.gguf")
    assert header.architecture == "llama"
    assert header.metadata["a.yes"] is True
    assert all(info.offset_bytes % 64 == 0 for info in header.tensors.values())


def test_header_of_the_embedded_model_equals_the_library_reader() -> None:
    header = check_header(resolve_model(None).path)
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152


def exit_code_of(program: str) -> int:
    """Of a fresh interpreter in the project's folder."""
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60).returncode


def test_reading_a_header_does_not_import_torch() -> None:
    program = (
        "import sys; from engine.weights.checkpoint import resolve_model; from engine.weights.gguf_header import "
        "read_gguf_header; from engine.models.families import spec_from_gguf; "
        "spec_from_gguf(read_gguf_header(resolve_model(None).path)); sys.exit('torch' in sys.modules)"
    )
    assert exit_code_of(program) == 0


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_gguf(make_tiny_model("llama", folder), folder / "tiny.gguf")


def test_all_of_loading_reads_the_header_once(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counting(path: Path) -> GGUFHeader:
        read.append(path)
        return read_gguf_header(path)

    monkeypatch.setattr("engine.weights.checkpoint.read_gguf_header", counting)
    source = resolve_model(str(tiny_gguf))
    assert read == [], "finding a model reads none of it"
    spec, dtype = read_spec(source), read_checkpoint_dtype(source)
    read_generation_config(source)
    assert weight_bytes_of(source, dtype, CPU, no_progress) > 0
    assert load_decoder(source, torch.float32, CPU, no_progress).spec == spec
    assert read == [tiny_gguf]
    assert source.closed() == source
    assert source.closed().gguf_header == source.gguf_header
    assert read == [tiny_gguf, tiny_gguf]


def test_counting_weight_bytes_does_not_import_sympy() -> None:
    """Half a second of every start; operators that torch has on `meta` only in Python bring it."""
    program = (
        "import sys, torch; from engine.weights.checkpoint import resolve_model; from engine.models.load import "
        "weight_bytes_of; weight_bytes_of(resolve_model(None), torch.float32, torch.device('cpu'), lambda *_: None); "
        "sys.exit('sympy' in sys.modules)"
    )
    assert exit_code_of(program) == 0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_header_is_a_load_error(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """Cut anywhere, or one byte of the first part changed: an error that names the file, or a header, never a crash."""
    content = bytearray(tiny_gguf.read_bytes())
    header_bytes = min(info.offset_bytes for info in read_gguf_header(tiny_gguf).tensors.values())
    path = tmp_path_factory.mktemp("damaged") / "d.gguf"
    if data.draw(st.booleans(), label="cut"):
        path.write_bytes(content[: data.draw(st.integers(0, header_bytes - 64), label="length")])
        with pytest.raises(LoadError, match=r"d\.gguf"):
            read_gguf_header(path)
    else:
        content[data.draw(st.integers(0, header_bytes - 1), label="at")] = data.draw(st.integers(0, 255), label="byte")
        path.write_bytes(content)
        with contextlib.suppress(LoadError):
            read_gguf_header(path)


DECODABLE = sorted({Quant.F32, Quant.F16, *gguf.quants._type_traits}, key=lambda kind: kind.value)
ENCODABLE = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0)


@pytest.mark.parametrize("kind", ENCODABLE, ids=lambda kind: kind.name)
def test_written_tensors_come_back_as_the_library_decodes_them(kind: Quant, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)
    encoded = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("output.weight", encoded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint(read_gguf_header(tmp_path / "m.gguf"), head_dim=8)
    assert list(checkpoint.names()) == ["lm_head.weight"]
    actual = read(checkpoint, "lm_head.weight")
    assert np.array_equal(actual.numpy(), gguf.quants.dequantize(encoded, kind))
    assert np.abs(actual.numpy() - values).max() < 0.4


def raw_checkpoint(path: Path, kind: int, shape: tuple[int, int], content: bytes) -> GGUFCheckpoint:
    path.write_bytes(b"\0" * 32 + content)
    info = GGUFTensorInfo(shape, kind, path, 32)
    return GGUFCheckpoint(GGUFHeader({"general.architecture": "qwen2"}, {"output.weight": info}), head_dim=8)


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_decodable_type_is_read(kind: Quant, tmp_path: Path) -> None:
    """From arbitrary bytes, since the library cannot encode all of them; compared bit by bit."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, blocks = 20, 3
    encoded = np.random.default_rng(1).integers(0, 60, (rows, blocks * block_bytes), dtype=np.uint8)
    shape = (rows, blocks * block_elements)
    actual = read(raw_checkpoint(tmp_path / "w", kind.value, shape, encoded.tobytes()), "lm_head.weight")
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(encoded, kind)
    assert expected.shape == shape
    assert np.array_equal(actual.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        (Quant.I32.value, (4, 32), "cannot decode GGUF type I32"),
        (999, (4, 32), "unknown GGUF type 999"),
        (Quant.Q8_0.value, (4, 33), "33 columns are not whole blocks of 32"),
        (Quant.F32.value, (400, 32), "the file ends inside tensor lm_head.weight"),
    ],
)
def test_unreadable_tensors_are_named(kind: int, shape: tuple[int, int], said: str, tmp_path: Path) -> None:
    checkpoint = raw_checkpoint(tmp_path / "w", kind, shape, b"\0" * 4096)
    with pytest.raises(LoadError, match=r"lm_head\.weight") as caught:
        checkpoint.copy_into("lm_head.weight", torch.empty(shape))
    assert said in str(caught.value)


def test_chunks_of_a_large_permuted_tensor_equal_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("llama", tmp_path, attention_bias=True)
    header = read_gguf_header(write_gguf(folder, tmp_path / "m.gguf"))
    whole = GGUFCheckpoint(header, head_dim=16)
    expected = {name: read(whole, name) for name in whole.names()}
    monkeypatch.setattr("engine.weights.gguf._MAX_CHUNK_ELEMENTS", 200)
    for name, values in expected.items():
        assert torch.equal(read(GGUFCheckpoint(header, head_dim=16), name), values)


def logits_of(path: Path) -> torch.Tensor:
    return naive_logits(load_decoder(resolve_model(str(path)), torch.float32, CPU, no_progress), PROMPT)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("smollm2", {}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {}),
    ],
)
def test_a_gguf_model_equals_the_safetensors_it_was_made_from(family: str, overrides: dict, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path, **overrides)
    path = write_gguf(folder, tmp_path / "m.gguf")
    torch.testing.assert_close(logits_of(path), logits_of(folder), atol=1e-5, rtol=0)


def test_gguf_yarn_equals_the_same_scaling_in_a_config(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = make_tiny_model("qwen2", tmp_path, rope_parameters=rope)
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    path = write_gguf(folder, tmp_path / "m.gguf", metadata=metadata)
    torch.testing.assert_close(logits_of(path), logits_of(folder), atol=1e-5, rtol=0)


def test_gguf_linear_scaling_equals_the_same_scaling_in_a_config(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    folder = make_tiny_model("llama", tmp_path, rope_parameters=rope)
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write_gguf(folder, tmp_path / "m.gguf", metadata=metadata)
    torch.testing.assert_close(logits_of(path), logits_of(folder), atol=1e-5, rtol=0)


def test_gguf_frequency_factors_equal_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp's converter stores llama3 scaling as one divisor per frequency."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder = make_tiny_model("llama", tmp_path, rope_parameters=rope)
    scaled = rope_frequencies(read_spec(resolve_model(str(folder))).rope, 16, 512)
    factors = (rope_frequencies(RopeSpec(theta=1e4), 16, 512) / scaled).numpy()
    path = write_gguf(folder, tmp_path / "m.gguf", rope_factors=factors)
    torch.testing.assert_close(logits_of(path), logits_of(folder), atol=1e-5, rtol=0)


def test_quantized_tiny_model_loads_near_the_original(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    exact = logits_of(folder)
    path = write_gguf(folder, tmp_path / "m.gguf", qtype=Quant.Q8_0)
    error = (logits_of(path) - exact).norm() / exact.norm()
    assert 0 < error < 0.1
    assert read_checkpoint_dtype(resolve_model(str(path))) == torch.bfloat16


def test_generation_settings_come_from_the_metadata(tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(make_tiny_model("llama", tmp_path), tmp_path / "m.gguf")))
    assert read_generation_config(source) == {"eos_token_id": [2]}
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "llama")
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(7)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    settings = read_generation_config(resolve_model(str(tmp_path / "n.gguf")))
    assert settings == {"eos_token_id": [5, 7], "temperature": 0.5, "top_k": 20}


def split_in_two(path: Path, set_count: Callable[[gguf.GGUFWriter], None]) -> list[Path]:
    """Two parts as llama.cpp's splitter writes them: all metadata in the first, the tensors shared out."""
    reader = gguf.GGUFReader(path)
    parts = [path.with_name(f"part-0000{index}-of-00002.gguf") for index in (1, 2)]
    for index, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        set_count(writer)
        for key, field in reader.fields.items():
            if index == 0 and key.startswith("llama."):
                value = field.contents()
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for tensor in reader.tensors[index::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_split_model_equals_the_whole(tmp_path: Path) -> None:
    path = write_gguf(make_tiny_model("llama", tmp_path / "model"), tmp_path / "whole.gguf")
    parts = split_in_two(path, lambda writer: writer.add_uint16("split.count", 2))
    assert torch.equal(logits_of(parts[0]), logits_of(path))
    with pytest.raises(LoadError, match="00001-of-00002"):
        read_gguf_header(parts[1])
    parts[1].unlink()
    with pytest.raises(LoadError, match=r"part-00002-of-00002\.gguf"):
        read_gguf_header(parts[0])


def test_names() -> None:
    assert canonical_name("blk.13.ffn_down.weight") == "model.layers.13.mlp.down_proj.weight"
    assert canonical_name("output_norm.weight") == "model.norm.weight"
    for strange in ("blk.0.ffn_gate_exps.weight", "blk.0.output.weight", "attn_q.weight", "token_embd.scale"):
        with pytest.raises(LoadError, match=strange):
            canonical_name(strange)
