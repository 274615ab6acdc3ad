"""Instruction-set levels of the kernels: which one is taken, and that integer products are the same bits at each."""

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import native
from engine.native import NativeUnavailable, find_compiler
from engine.quant.affine import AffineWeight, quantize
from engine.quant.panels import packed

SOURCES = Path(native.__file__).parent / "csrc"
PRODUCTS = ("matmul", "dot", "round", "pack")
FLAGS = ("-std=c++17", "-O1", "-fopenmp", "-fPIC", "-ffp-contract=off")
"""No fused multiply-add: levels that have it would round once where the others round twice."""
LEVELS = native._LEVEL_FLAGS

pytestmark = pytest.mark.skipif(native.find_native() is None, reason="no native kernels here")


def compile_products(level: str, folder: Path) -> Path:
    """The products as a library of their own; what the compiler says is an error."""
    commands = [
        (find_compiler(), *FLAGS, *LEVELS[level], "-c", str(SOURCES / f"{name}.cpp"), "-o", str(folder / f"{name}.o"))
        for name in PRODUCTS
    ]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands))
    assert [done.stderr for done in said] == [""] * len(PRODUCTS)
    library = folder / f"products {level}.so"
    objects = [str(folder / f"{name}.o") for name in PRODUCTS]
    subprocess.run((find_compiler(), "-shared", "-fopenmp", *objects, "-o", str(library)), check=True)
    return library


@pytest.mark.slow
def test_products_compile_for_integer_instructions_without_a_word(tmp_path: Path) -> None:
    try:
        compile_products("AVX512 VNNI", tmp_path)
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no AVX2 here")
def test_plain_loops_and_avx2_give_the_same_bits(tmp_path: Path) -> None:
    plain, wide = (ctypes.CDLL(str(compile_products(level, tmp_path))) for level in ("DEFAULT", "AVX2"))
    torch.manual_seed(0)
    for bits, input_bits in ((4, 16), (8, 16), (8, 8)):
        stored = quantize(torch.randn(70, 320), bits, torch.float16)
        fine = AffineWeight(bits, stored.q, stored.scales.repeat_interleave(2, 1), None)
        for weight in (stored, fine):
            matrix = packed(weight, torch.randn(70), input_bits)
            for rows in (1, 2, 3, 7, 33, 100):
                x = torch.randn(rows, 320) * torch.logspace(-3, 3, 320)
                x[0, :32] = 0.0
                ours, theirs = (replace(matrix, kernels=kernels)(x) for kernels in (plain, wide))
                assert torch.equal(ours, theirs), (bits, input_bits, rows)


@pytest.mark.parametrize(
    ("capability", "flags", "level"),
    [
        ("AVX512", "avx512f avx512bw avx512_vnni", "AVX512 VNNI"),
        ("AVX512", "avx512f avx512bw", "AVX512"),
        ("AVX2", "avx2 avx512_vnni", "AVX2"),
        ("DEFAULT", "", "DEFAULT"),
    ],
)
def test_level(capability: str, flags: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user held torch back from is not used either."""
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(native, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert native._level() == level


def test_level_where_the_machine_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert native._level() == "AVX512"
