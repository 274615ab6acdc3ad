"""The native CPU kernels: compiling `csrc/` with the machine's own C++ compiler, once, and loading the result.

Knows compilers, instruction-set levels and a plain C interface; knows nothing of models. One shared library per level,
flags and source state, kept in `$QUIRE_CACHE_DIR` (or the user's cache folder), so a changed source or machine builds
anew. Without a compiler, or with `QUIRE_NATIVE=0`, `load_native` says why and the torch code serves.
`QUIRE_NATIVE_FLAGS` adds compiler flags (for sanitizers). `python -m engine.native` compiles and prints where to.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from engine.config import Progress, no_progress

_SOURCES = Path(__file__).parent / "csrc"
_LEVEL_FLAGS = {
    "AVX512 VNNI": ("-march=x86-64-v4", "-mavx512vnni"),
    "AVX512": ("-march=x86-64-v4",),
    "AVX2": ("-march=x86-64-v3",),
    "DEFAULT": (),
}
"""Name of an instruction set -> compiler flags."""
_CPU_INFO = Path("/proc/cpuinfo")
_FLAGS = (
    *("-std=c++17", "-O2", "-fvect-cost-model=dynamic", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
"""No flag that lets the compiler reorder additions: a row's bits must not depend on the loop that computed it. The
kernels unroll what they need to; -O3 takes four times as long for the same speed."""
_PHASE = "compiling native kernels"
_log = logging.getLogger(__name__)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""`DType` of `csrc/simd.h`."""


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


def load_native(progress: Progress = no_progress) -> ctypes.CDLL:
    """The loaded kernels, compiled first if need be (some ten seconds, once).

    Raises:
        NativeUnavailable: switched off, no compiler, or it failed.
    """
    return _open(build_native(progress))


def build_native(progress: Progress = no_progress) -> Path:
    """The library of the kernels, compiled if it is not there. Raises as `load_native`."""
    if os.environ.get("QUIRE_NATIVE") == "0":
        raise NativeUnavailable("switched off by QUIRE_NATIVE=0")
    flags = (*_FLAGS, *_LEVEL_FLAGS.get(_level(), ()), *_extra_flags())
    library = _library_path(flags)
    if not library.exists():
        progress(_PHASE, 0.0)
        if problem := _build_problem(library, flags):
            raise NativeUnavailable(problem)
        progress(_PHASE, 1.0)
    return library


def _level() -> str:
    """The widest instruction set that torch found here, with integer products or without, which torch leaves open."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "AVX512 VNNI" if capability == "AVX512" and "avx512_vnni" in _cpu_words(_CPU_INFO) else capability


@cache
def _cpu_words(cpu_info: Path) -> frozenset[str]:
    """What Linux says of its processors, read once: it is long where there are many."""
    return frozenset(cpu_info.read_text().split()) if cpu_info.exists() else frozenset()


def find_native(progress: Progress = no_progress) -> ctypes.CDLL | None:
    """The same, or None where the torch code must serve; the reason is logged once."""
    try:
        return load_native(progress)
    except NativeUnavailable as error:
        _log_reason(str(error))
        return None


@cache
def _log_reason(reason: str) -> None:
    _log.warning("no native CPU kernels, torch's operators serve: %s", reason)


@cache
def _open(library: Path) -> ctypes.CDLL:
    try:
        kernels = ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {library}: {error}") from error
    kernels.quire_decoder_workspace.restype = ctypes.c_int64
    for name in ("quire_rms_norm", "quire_rope_store", "quire_silu_multiply"):
        getattr(kernels, name).restype = None
    return kernels


def _extra_flags() -> tuple[str, ...]:
    return tuple(os.environ.get("QUIRE_NATIVE_FLAGS", "").split())


def find_compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else the machine's. Raises NativeUnavailable where there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailable("no C++ compiler found (looked for $CXX, g++, c++)")


@cache
def _library_path(flags: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quire"
    return Path(os.environ.get("QUIRE_CACHE_DIR", default)) / f"kernels-{digest.hexdigest()[:16]}.so"


@cache
def _build_problem(library: Path, flags: tuple[str, ...]) -> str | None:
    """Build `library`; what went wrong, or None. Tried once, so that a failure costs its time once.

    The library gets its name when it is whole, so that processes starting together do not see half a file.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            _compile(find_compiler(), flags, Path(folder)).replace(library)
    except NativeUnavailable as error:
        return str(error)
    except OSError as error:
        return f"cannot build {library}: {error}"
    return None


def _compile(compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Every source on its own, side by side, then one shared library."""
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        commands = [
            (compiler, *flags, "-c", str(source), "-o", str(target))
            for source, target in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
    library = folder / "kernels.so"
    _run((compiler, *flags, "-shared", *map(str, objects), "-o", str(library)))
    return library


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[:500]}")


if __name__ == "__main__":
    print(build_native())
