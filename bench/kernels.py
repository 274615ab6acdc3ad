"""`python -m bench.kernels`: each native kernel against torch's operator and against what the machine can do.

    product    y = x W^T at several numbers of rows, by weight form; bound: reading the weights, or the GEMM
    attention  decode rows and prefill chunks over the paged pool; bound: reading keys and values, or the GEMM
    decoder    a whole step of the embedded model; bound: reading all weights, or the GEMM

Every time is the best of many calls and stands beside bounds measured in the same process. The products go round a set
of matrices that are larger than the last cache in their own form, as a model's layers do. The GEMM is torch's in
float32: for products of integers, which a processor computes faster, that is no bound but a mark.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.bounds import GEMM_SHAPE, READ_BYTES, best_time
from bench.machine import busy_warning, commit, load_average, num_cores, processor, software
from bench.report import table
from engine.attention.interface import AttentionInputs, AttentionShape
from engine.attention.native_cpu import NativeCPUAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import no_progress
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.quant.affine import AffineWeight, quantize
from engine.quant.groups import largest_group
from engine.quant.panels import PackedLinear, packed
from engine.weights.checkpoint import resolve_model
from kvpool.layout import KVLayout
from kvpool.storage import KVStorage
from server.openmp import tame_thread_barriers

ROWS = (1, 2, 4, 8, 32, 128, 512)
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 2048))
SET_BYTES = 80 << 20
"""Weights that a measurement goes round: more than the caches hold."""
STEPS = (1, 2, 4, 8, 16, 32)
CONTEXT = 160
BLOCK_SIZE = 16

FORMS: dict[str, tuple[Callable[[Tensor], Tensor | AffineWeight], int]] = {
    "float32": (lambda weight: weight, 16),
    "bfloat16": (lambda weight: weight.bfloat16(), 16),
    "Q8_0": (lambda weight: quantize(weight, 8, torch.float16), 16),
    "int8": (lambda weight: quantize(weight, 8, torch.float16), 8),
    "int4": (lambda weight: quantize(weight, 4, torch.float16), 16),
    "int4_g128": (lambda weight: quantize(weight, 4, torch.float16, largest_group(weight.shape[1])), 16),
}
"""How weights are stored, and what quantized ones round their inputs to; Q4_1 of a file is int4."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine reached in this process."""

    read_bytes_per_s: float
    gemm_per_s: float

    def bound_s(self, num_bytes: float, operations: float) -> float:
        """Least time of work that reads so much and computes so much."""
        return max(num_bytes / self.read_bytes_per_s, operations / self.gemm_per_s)


def measure_machine() -> Machine:
    """Stream read and float32 GEMM."""
    data = torch.ones(READ_BYTES // 4)
    rows, inner, columns = GEMM_SHAPE
    left, right = torch.ones(rows, inner), torch.ones(columns, inner)
    return Machine(
        READ_BYTES / min(best_time(data.sum), best_time(data.view(torch.int32).max)),
        2 * rows * inner * columns / best_time(lambda: torch.mm(left, right.T)),
    )


def product_rows(machine: Machine, shape: tuple[int, int]) -> list[list[str]]:
    """One line for each form and number of rows."""
    lines = []
    dense = [torch.randn(shape) for _ in range(max(1, SET_BYTES // (4 * shape[0] * shape[1])))]
    for name, (form, input_bits) in FORMS.items():
        stored = form(dense[0])
        matrices = [packed(stored, None, input_bits)]
        matrices += [packed(stored, None, input_bits) for _ in range(SET_BYTES // matrices[0].nbytes)]
        for num_rows in ROWS:
            x = torch.randn(num_rows, shape[1])
            native_s = _round(lambda m, x=x: m(x), matrices)
            torch_s = _round(lambda w, x=x: F.linear(x, w), dense)
            lines.append(_product_line(machine, name, matrices[0], num_rows, (native_s, torch_s)))
    return lines


def _product_line(
    machine: Machine, form: str, matrix: PackedLinear, num_rows: int, seconds: tuple[float, float]
) -> list[str]:
    native_s, torch_s = seconds
    operations = 2 * num_rows * matrix.num_inputs * matrix.num_outputs
    bound_s = machine.bound_s(matrix.nbytes, operations)
    name = f"{matrix.num_outputs} x {matrix.num_inputs} {form}"
    return [name, str(num_rows), *_figures(native_s, torch_s, bound_s, matrix.nbytes, operations)]


def attention_rows(machine: Machine) -> list[list[str]]:
    """Decode batches and prefill chunks at SmolLM2's shape: 9 query heads, 3 kv heads of 64."""
    cases = [(rows, 1, context) for context in (CONTEXT, 2048) for rows in (1, 8, 32)]
    cases += [(1, 64, 64), (1, 512, 512), (1, 256, 2048)]
    lines = []
    for num_rows, count, context in cases:
        layout = KVLayout(1, 3, 64, BLOCK_SIZE, 4)
        per_row = -(-context // BLOCK_SIZE)
        storage = KVStorage(layout, num_rows * per_row, torch.float32, torch.device("cpu"))
        storage.data.normal_()
        inputs = _inputs(num_rows, count, context, per_row)
        q, k, v = (torch.randn(num_rows * count, heads, 64) for heads in (9, 3, 3))
        shape = AttentionShape(9, 0.125, (None,))
        steps = [backend(storage, shape).plan(inputs) for backend in (NativeCPUAttention, TorchPagedAttention)]
        native_s, torch_s = (best_time(partial(step, 0, q, k, v)) for step in steps)
        num_pairs = num_rows * (count * context - count * (count - 1) // 2)
        num_bytes, operations = num_rows * context * layout.bytes_per_token, 4 * 64 * 9 * num_pairs
        figures = _figures(native_s, torch_s, machine.bound_s(num_bytes, operations), num_bytes, operations)
        lines.append([f"{num_rows} x {count} over {context}", str(num_rows * count), *figures])
    return lines


def decoder_rows(machine: Machine, quantization: str) -> list[list[str]]:
    """Whole decode steps of the embedded model, head included, at `CONTEXT` tokens; and one prefill of 512."""
    decoder = load_decoder(resolve_model(None), torch.float32, torch.device("cpu"), no_progress, None, quantization)
    spec = decoder.spec
    per_layer = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    lines = []
    for num_rows, count, context in [*((rows, 1, CONTEXT) for rows in STEPS), (1, 512, 512)]:
        step, kv_bytes = _decoder_step(decoder, num_rows, count, context)
        with torch.inference_mode():
            seconds = best_time(step)
        head_operations = 2 * spec.vocab_size * spec.hidden_size * num_rows
        operations = 2 * spec.num_layers * per_layer * num_rows * count + head_operations
        bound_s = machine.bound_s(decoder.weight_bytes + kv_bytes, operations)
        name = f"{quantization}, {num_rows} x {count} over {context}"
        figures = (f"{seconds * 1e3:.2f}", f"{bound_s * 1e3:.2f}", f"{bound_s / seconds:.0%}")
        lines.append([name, *figures, f"{num_rows * count / seconds:.0f}"])
    return lines


def _decoder_step(decoder: Decoder, num_rows: int, count: int, context: int) -> tuple[Callable[[], Tensor], int]:
    """A step to repeat, with the logits of each row's last token; and the bytes of keys and values that it reads."""
    spec = decoder.spec
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    per_row = -(-context // BLOCK_SIZE)
    storage = KVStorage(layout, num_rows * per_row, torch.float32, torch.device("cpu"))
    storage.data.normal_()
    inputs = _inputs(num_rows, count, context, per_row)
    attention = NativeCPUAttention(storage, AttentionShape(spec.num_heads, spec.head_dim**-0.5, spec.sliding_window))
    token_ids = torch.arange(num_rows * count) % spec.vocab_size
    positions = torch.arange(context - count, context).repeat(num_rows)

    def step() -> Tensor:
        hidden = decoder.forward(token_ids, positions, attention.plan(inputs))
        return decoder.logits(hidden[count - 1 :: count])

    return step, num_rows * context * layout.bytes_per_token


def _inputs(num_rows: int, count: int, context: int, per_row: int) -> AttentionInputs:
    """Rows of `count` new tokens, `context` with them, each over blocks of its own."""
    tables = torch.randperm(num_rows * per_row).view(num_rows, per_row)
    positions = torch.arange(context - count, context)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionInputs(
        query_starts=np.arange(num_rows + 1, dtype=np.int64) * count,
        context_lens=np.full(num_rows, context, dtype=np.int64),
        num_decode_rows=num_rows if count == 1 else 0,
        block_tables=tables,
        slot_mapping=slots.flatten(),
    )


def _round(work: Callable[[Any], object], operands: Sequence[Any]) -> float:
    """Seconds of one call, each with the next operand."""
    rest = cycle(operands)
    return best_time(lambda: work(next(rest)))


def _figures(native_s: float, torch_s: float, bound_s: float, num_bytes: float, operations: float) -> list[str]:
    return [
        f"{native_s * 1e6:.0f}",
        f"{torch_s * 1e6:.0f}",
        f"{torch_s / native_s:.1f}",
        f"{num_bytes / native_s / 1e9:.1f}",
        f"{operations / native_s / 1e9:.0f}",
        f"{bound_s / native_s:.0%}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("product", "attention", "decoder"), help="one of the tables")
    parser.add_argument(
        "--quantization", default="auto,none,int8,int4,int4_g128", help="of the decoder, separated by commas"
    )
    args = parser.parse_args(argv)
    environment = dict(os.environ)
    tame_thread_barriers(environment)
    if environment != os.environ:  # OpenMP has read its settings by now: begin again with them
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "bench.kernels", *(argv or sys.argv[1:])], environment)
    load = load_average()
    torch.set_num_threads(num_cores())
    machine = measure_machine()
    print(f"{processor()}, {num_cores()} threads, commit {commit()}, {software()}")
    print(f"stream read {machine.read_bytes_per_s / 1e9:.1f} GB/s, GEMM {machine.gemm_per_s / 1e9:.0f} GFLOP/s\n")
    if warning := busy_warning(load):
        print(f"{warning}\n")
    head = ("", "rows", "native us", "torch fp32 us", "torch / native", "GB/s", "GFLOP/s", "of bound")
    if args.only in (None, "product"):
        print(table(head, [line for shape in SHAPES for line in product_rows(machine, shape)]), end="\n\n")
    if args.only in (None, "attention"):
        print(table(head, attention_rows(machine)), end="\n\n")
    if args.only in (None, "decoder"):
        lines = [line for name in args.quantization.split(",") for line in decoder_rows(machine, name)]
        print(table(("decoder step", "ms", "bound ms", "of bound", "tokens/s"), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
