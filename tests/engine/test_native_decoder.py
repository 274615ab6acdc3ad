"""The decoder as one native call: equal to the Python forward and to plain torch, and the same bits in any company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from engine.attention.interface import AttentionInputs, AttentionShape
from engine.attention.native_cpu import NativeCPUAttention
from engine.config import no_progress
from engine.models.allocate import empty_decoder
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, read_spec
from engine.models.native_decoder import NativeDecoder
from engine.models.parameters import DenseParameters
from engine.native import NativeUnavailable, load_native
from engine.quant.panels import StackedLinear
from engine.weights.assign import assign
from engine.weights.checkpoint import resolve_model
from engine.weights.gguf import GGUFCheckpoint
from engine.weights.gguf_header import read_gguf_header
from engine.weights.safetensors import SafetensorsCheckpoint
from kvpool.layout import KVLayout
from kvpool.storage import KVStorage
from kvpool.table import blocks_for
from tests.fakes.naive_attention import naive_logits
from tests.fakes.tiny_gguf import write_gguf
from tests.fakes.tiny_models import make_tiny_model

try:
    load_native()
except NativeUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

CPU = torch.device("cpu")
BLOCK_SIZE = 4
PROMPT = [(7 * index * index + 3) % 288 for index in range(90)]


def load(path: Path, quantization: str = "auto", dtype: torch.dtype = torch.float32) -> NativeDecoder:
    decoder = load_decoder(resolve_model(str(path)), dtype, CPU, no_progress, None, quantization)
    assert isinstance(decoder, NativeDecoder)
    return decoder


def load_dense(path: Path) -> Decoder:
    """The same model as plain float32 tensors."""
    source = resolve_model(str(path))
    spec, parameters = read_spec(source), DenseParameters(torch.float32, CPU)
    decoder = empty_decoder(spec, parameters, spec.default_context)
    checkpoint = (
        GGUFCheckpoint(read_gguf_header(path), spec.head_dim) if source.kind == "gguf" else SafetensorsCheckpoint(path)
    )
    assign(checkpoint, parameters.places, spec.tie_word_embeddings, lambda done: None)
    return decoder


class Sequences:
    """Sequences over one pool, each with scattered blocks of its own; steps of any rows."""

    def __init__(self, decoder: Decoder, num_sequences: int, max_len: int = 128) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._per_sequence = blocks_for(max_len, BLOCK_SIZE)
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, decoder.dtype.itemsize)
        storage = KVStorage(layout, num_sequences * self._per_sequence, decoder.dtype, CPU)
        storage.data.zero_()
        self._attention = NativeCPUAttention(
            storage, AttentionShape(spec.num_heads, spec.head_dim**-0.5, spec.sliding_window)
        )
        blocks = np.random.default_rng(5).permutation(num_sequences * self._per_sequence)
        self._tables = torch.from_numpy(blocks.reshape(num_sequences, -1))
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def step(self, *rows: tuple[int, Sequence[int]], python: bool = False) -> list[torch.Tensor]:
        """Append tokens to sequences; their hidden states `[tokens, hidden]`, row by row."""
        numbers, counts = [number for number, _ in rows], [len(tokens) for _, tokens in rows]
        positions = torch.cat([torch.arange(self.lengths[n], self.lengths[n] + len(t)) for n, t in rows])
        owners = torch.tensor(numbers).repeat_interleave(torch.tensor(counts))
        for number, count in zip(numbers, counts, strict=True):
            self.lengths[number] += count
        inputs = AttentionInputs(
            query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            context_lens=np.array([self.lengths[number] for number in numbers], dtype=np.int64),
            num_decode_rows=0,
            block_tables=self._tables[numbers],
            slot_mapping=self._tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        )
        attend = self._attention.plan(inputs)
        token_ids = torch.tensor([token for _, tokens in rows for token in tokens])
        forward = Decoder.forward if python else type(self._decoder).forward
        return list(forward(self._decoder, token_ids, positions, attend).split(counts))

    def generate(self, number: int, prompt: Sequence[int], chunk: int, steps: int) -> torch.Tensor:
        """Hidden states of a prompt in chunks, then of `steps` further tokens one by one."""
        states = [self.step((number, prompt[i : i + chunk]))[0] for i in range(0, len(prompt), chunk)]
        states += [self.step((number, [(11 * i + 3) % 288]))[0] for i in range(steps)]
        return torch.cat(states)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ("llama", "smollm2", "mistral", "qwen2", "qwen3")},
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "small heads": ("llama", {"hidden_size": 48, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "odd sizes": ("llama", {"hidden_size": 40, "intermediate_size": 52, "head_dim": 10}),
    "windows on one layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_equals_the_python_forward(variant: str, tmp_path: Path) -> None:
    """Chunks, decode rows and mixtures; both continue from their own pools."""
    family, overrides = VARIANTS[variant]
    decoder = load(make_tiny_model(family, tmp_path, **overrides))
    fast, slow = Sequences(decoder, 3), Sequences(decoder, 3)
    steps: list[list[tuple[int, list[int]]]] = [
        [(0, PROMPT[:70])],
        [(0, [5]), (1, PROMPT[:33])],
        [(1, [9]), (0, [8]), (2, [7])],
        [(2, PROMPT[40:45]), (1, PROMPT[:2])],
    ]
    for rows in steps:
        for got, want in zip(fast.step(*rows), slow.step(*rows, python=True), strict=True):
            assert want.std() > 0.1
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_logits_equal_dense_ones(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_tiny_model(family, tmp_path, **overrides)
    torch.testing.assert_close(
        naive_logits(load(folder), PROMPT), naive_logits(load_dense(folder), PROMPT), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kept_in_sixteen_bits_and_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """A file in that type loses nothing, another is rounded; keys and values are, by the kernels and by torch alike."""
    stored_wide, stored_so = (
        make_tiny_model("qwen3", tmp_path / name, dtype=stored)
        for name, stored in {"wide": torch.float32, "so": dtype}.items()
    )
    assert torch.equal(naive_logits(load(stored_so, dtype=dtype), PROMPT), naive_logits(load(stored_so), PROMPT))
    decoder, exact = load(stored_wide, dtype=dtype), load(stored_wide)
    assert decoder.dtype == dtype
    assert decoder.weight_bytes < 0.52 * exact.weight_bytes
    difference = naive_logits(decoder, PROMPT) - naive_logits(exact, PROMPT)
    assert 1e-5 < difference.norm() / naive_logits(exact, PROMPT).norm() < 0.02
    fast, slow = Sequences(decoder, 2), Sequences(decoder, 2)
    for rows in ([(0, PROMPT[:70])], [(0, [5]), (1, PROMPT[:33])], [(1, [9]), (0, [8])]):
        for got, want in zip(fast.step(*rows), slow.step(*rows, python=True), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, want, atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    "form", ["float32", "bfloat16", "Q8_0", "Q4_1", "int8", "int4", "int4_g128", "kept bfloat16", "kept float16"]
)
def test_a_token_is_the_same_bits_in_any_company(form: str, tmp_path: Path) -> None:
    """Alone or among 31 others, its prompt whole or in chunks, on one thread or several."""
    folder = make_tiny_model("llama", tmp_path, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)
    if form.startswith("Q"):
        decoder = load(write_gguf(folder, tmp_path / "m.gguf", qtype=Quant[form]))
    elif form.startswith("kept"):
        decoder = load(folder, dtype=getattr(torch, form.split()[1]))
    else:
        decoder = load(folder, form if form.startswith("int") else "auto")
    alone = Sequences(decoder, 1).generate(0, PROMPT, chunk=90, steps=20)
    for chunk in (1, 7, 32):
        assert torch.equal(Sequences(decoder, 1).generate(0, PROMPT, chunk, 20), alone)
    crowd = Sequences(decoder, 32)
    for number in range(1, 32):
        crowd.step((number, PROMPT[number : 2 * number]))
    states = [crowd.step((0, PROMPT[:50]), (7, PROMPT[:3]))[0], crowd.step((3, [1]), (0, PROMPT[50:]))[1]]
    for i in range(20):
        rows = [(number, [(11 * i + 3) % 288 if number == 0 else (number + i) % 288]) for number in range(32)]
        states.append(crowd.step(*rows)[0])
    assert torch.equal(torch.cat(states), alone)
    logits = decoder.logits(alone)
    assert torch.equal(decoder.logits(alone[-1:]), logits[-1:])


def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    decoder = load(make_tiny_model("mistral", tmp_path))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(Sequences(decoder, 1).generate(0, PROMPT, chunk=40, steps=3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])


QTYPES = [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1]


@pytest.mark.parametrize("kind", QTYPES, ids=lambda kind: kind.name)
def test_gguf_kept_quantized_equals_its_dequantized_values(kind: Quant, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, attention_bias=True)
    path = write_gguf(folder, tmp_path / "m.gguf", qtype=kind)
    packed, dense = load(path), load_dense(path)
    assert packed.weight_bytes < dense.weight_bytes * 0.66
    lost = 1e-4 if kind in (Quant.F16, Quant.BF16) else 3e-3  # inputs rounded to 16 bits
    torch.testing.assert_close(naive_logits(packed, PROMPT), naive_logits(dense, PROMPT), atol=lost, rtol=0)
    widened = load(path, "none")
    torch.testing.assert_close(naive_logits(widened, PROMPT), naive_logits(dense, PROMPT), atol=1e-4, rtol=0)


def test_parts_of_unlike_types_stand_side_by_side(tmp_path: Path) -> None:
    """Values of 8 bits beside queries and keys of 4, as mixed GGUF files have them; down kept as float."""
    folder = make_tiny_model("llama", tmp_path)
    kinds = {"attn_v": Quant.Q8_0, "ffn_up": Quant.F16, "ffn_down": Quant.F32}
    path = write_gguf(folder, tmp_path / "m.gguf", qtype=lambda name: kinds.get(name.split(".")[-2], Quant.Q4_1))
    packed = load(path)
    attention = packed.layers[0].attention.qkv
    assert isinstance(attention, StackedLinear)
    assert [part.num_outputs for part in attention.parts] == [96, 32]
    torch.testing.assert_close(naive_logits(packed, PROMPT), naive_logits(load_dense(path), PROMPT), atol=3e-3, rtol=0)
    fast, slow = Sequences(packed, 1), Sequences(packed, 1)
    for rows in ([(0, PROMPT[:30])], [(0, [5])]):
        torch.testing.assert_close(fast.step(*rows)[0], slow.step(*rows, python=True)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("quantization", "allowed"), [("int8", 0.05), ("int4", 0.3), ("int4_g128", 0.4)])
def test_rounding_at_load_stays_near_the_original(quantization: str, allowed: float, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, num_hidden_layers=1)
    exact, rounded = load(folder), load(folder, quantization)
    difference = naive_logits(rounded, PROMPT) - naive_logits(exact, PROMPT)
    assert 1e-3 < difference.norm() / naive_logits(exact, PROMPT).norm() < allowed
    assert rounded.weight_bytes < exact.weight_bytes * 0.33


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    decoder = load(make_tiny_model("llama", tmp_path))
    for token in (-1, 288):
        with pytest.raises(IndexError, match="288"):
            Sequences(decoder, 1).step((0, [1, token]))
        with pytest.raises(IndexError, match="288"):
            Sequences(decoder, 1).step((0, [1, token]), python=True)
