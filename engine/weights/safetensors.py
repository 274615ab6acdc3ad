"""Weights from safetensors: one file, or shards named by an index. Files are mapped, tensors read when asked for.

Knows the files' layout (`model.safetensors`, `model.safetensors.index.json`); knows nothing of models.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import LoadError
from engine.quant.affine import DenseForm

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_KEPT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsCheckpoint:
    """The tensors of a folder's safetensors files; a `Checkpoint`. Use as a context manager to close the files.

    Raises:
        LoadError: no weights, a shard is missing or damaged, or a tensor is in two files.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        wanted = _indexed_files(folder) or dict.fromkeys(_weight_files(folder))
        for path, names in wanted.items():
            self._open(path, names)

    def __enter__(self) -> "SafetensorsCheckpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file_of.clear()
        self._stack.close()

    def names(self) -> Iterable[str]:
        """All tensors, each once."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape, from the file's header."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype_name(self, name: str) -> str:
        """The stored element type in the format's own words, such as `BF16`."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def copy_into(self, name: str, target: Tensor) -> None:
        """Write the tensor into `target`, cast to its dtype."""
        try:
            target.copy_(self._file_of[name].get_tensor(name))
        except SafetensorError as error:
            raise LoadError(f"{self._path_of[name]}: tensor {name}: {error}") from error

    def form(self, name: str) -> DenseForm:
        """The stored dtype; float32 for others than float32, bfloat16 and float16."""
        return DenseForm(_KEPT_DTYPES.get(self.dtype_name(name), torch.float32))

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Rows `start : end` of a matrix, in the dtype that `form` told."""
        try:
            rows: Tensor = self._file_of[name].get_slice(name)[start:end]
        except SafetensorError as error:
            raise LoadError(f"{self._path_of[name]}: tensor {name}: {error}") from error
        return rows.to(self.form(name).dtype)

    def _open(self, path: Path, names: list[str] | None) -> None:
        """Add a file's tensors; an index must name exactly those that the file holds."""
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path}: cannot be read ({error})") from error
        held = set(file.keys())
        if names is not None and held != set(names):
            odd = min(held ^ set(names))
            raise LoadError(f"{path}: tensor {odd} is {'not in the index' if odd in held else 'missing'}")
        for name in held:
            if name in self._file_of:
                raise LoadError(f"tensor {name} is in both {self._path_of[name]} and {path}")
            self._file_of[name], self._path_of[name] = file, path


def _indexed_files(folder: Path) -> dict[Path, list[str] | None]:
    """The shards that the index names, each with its tensors; empty without an index."""
    index = folder / _INDEX
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for name, file_name in weight_map.items():
            shards.setdefault(file_name, []).append(name)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"{index}: not a weight index ({type(error).__name__}: {error})") from error
    return {folder / file_name: names for file_name, names in shards.items()}


def _weight_files(folder: Path) -> list[Path]:
    """The files of a folder without an index. `consolidated*` holds the same weights under other names."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if not files:
        pickled = any(folder.glob("*.bin"))
        hint = "; its .bin files are pickles and are not read, convert them first" if pickled else ""
        raise LoadError(f"folder {folder}: no {_SINGLE}, no {_INDEX}{hint}")
    return files
