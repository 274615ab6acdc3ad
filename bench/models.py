"""The models that are measured, made on this machine where they do not exist yet, and kept in a cache folder.

    smollm2               the embedded model's own GGUF file (Q4_1)
    qwen2.5-0.5b-shape    random weights of Qwen2.5-0.5B's shape: a folder with bfloat16 safetensors
    NAME:FORM             the same in another form: bf16, f16, q8_0, q4_0, q4_1 (GGUF), or safetensors (bfloat16)
    anything else         a folder, a .gguf file or a hub id

`python -m bench.models NAME...` makes them and prints their paths. Files get their names when they are whole.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.weights.checkpoint import resolve_model

EMBEDDED, SHAPE = "smollm2", "qwen2.5-0.5b-shape"
GGUF_FORMS = ("bf16", "f16", "q8_0", "q4_0", "q4_1")
FOLDER_FORM = "safetensors"
_VERSION = 1
"""Part of made files' names; raised when what is made changes."""


def model_path(name: str) -> Path:
    """Where the model called `name` lies, after making it if need be.

    Raises:
        ValueError: no such form.
        LoadError: no such model.
    """
    base, colon, form = name.partition(":")
    if base not in (EMBEDDED, SHAPE):
        return resolve_model(name).path
    if not colon:
        return resolve_model(None).path if base == EMBEDDED else _made(f"{base}-{FOLDER_FORM}", _make_shape)
    if form == FOLDER_FORM:
        if base == SHAPE:
            return model_path(base)
        return _made(f"{base}-{form}", lambda folder: _make_folder(model_path(base), folder))
    if form not in GGUF_FORMS:
        raise ValueError(f"{name!r}: the forms are {', '.join((*GGUF_FORMS, FOLDER_FORM))}")
    return _made(f"{base}-{form}", lambda folder: _make_gguf(model_path(base), folder / f"{base}-{form}.gguf", form))


def cache_folder() -> Path:
    """Where made models are kept: below `$QUIRE_CACHE_DIR`, or the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quire"
    return Path(os.environ.get("QUIRE_CACHE_DIR", default)) / "bench"


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """A folder filled by `make`, or the only GGUF file in it."""
    target = cache_folder() / f"{name}-v{_VERSION}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            make(folder)
            shutil.move(folder, target)
    files = list(target.glob("*.gguf"))
    return files[0] if files else target


def _make_shape(folder: Path) -> None:
    from bench.random_model import QWEN_05B, write_random_model

    write_random_model(QWEN_05B, resolve_model(None).path, folder)


def _make_folder(source: Path, folder: Path) -> None:
    from bench.reference import write_folder

    write_folder(source, folder)


def _make_gguf(source: Path, target: Path, form: str) -> None:
    from bench.gguf_forms import convert_folder, convert_gguf

    if source.is_dir():
        convert_folder(source, resolve_model(None).path, target, form)
    else:
        convert_gguf(source, target, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the named models and print where they are."""
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{EMBEDDED}, {SHAPE}, or one of them with :FORM")
    for name in parser.parse_args(argv).names:
        print(model_path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
