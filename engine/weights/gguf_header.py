"""Reads the front of a GGUF file: its metadata and where its tensors lie. Torch-free, no GGUF library, milliseconds.

Layout (little-endian, the GGUF specification of the ggml project, versions 2 and 3):

    "GGUF" | version u32 | num_tensors u64 | num_entries u64
    entries:  key string | type u32 | value
    tensors:  name string | num_dims u32 | dims u64 x num_dims | type u32 | offset u64
    padding to `general.alignment` (32) | tensor data, offsets counted from here

Knows bytes and names; knows nothing of models or of how a tensor type is decoded.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import LoadError

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_FLOAT32 = 0


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor lies. `shape` is outermost first (the file stores it innermost first).

    `ggml_type` is the number of its encoding; `offset_bytes` counts from the beginning of the file at `path`.
    """

    shape: tuple[int, ...]
    ggml_type: int
    path: Path
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensors of a model; of a split model, all parts' tensors and the first part's metadata."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]

    @property
    def architecture(self) -> str:
        """The prefix of the model's own metadata keys, such as `llama`."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf_header(path: Path) -> GGUFHeader:
    """The header of a GGUF file; the first part of a split model stands for all of them.

    Raises:
        LoadError: not a GGUF file, an unknown version, damaged, or a part is missing.
    """
    first = _read_part(path)
    num_parts = int(first.metadata.get("split.count", 1))
    if num_parts <= 1:
        return first
    tensors = dict(first.tensors)
    for part_path in _other_parts(path, num_parts):
        part = _read_part(part_path)
        if repeated := tensors.keys() & part.tensors.keys():
            raise LoadError(f"{part_path}: tensor {min(repeated)} is in an earlier part too")
        tensors.update(part.tensors)
    return GGUFHeader(first.metadata, tensors)


def read_float32_tensor(info: GGUFTensorInfo) -> tuple[float, ...]:
    """The values of a small, unquantized float32 vector.

    Raises:
        LoadError: the tensor is stored in another type.
    """
    if info.ggml_type != _FLOAT32 or len(info.shape) != 1:
        raise LoadError(f"{info.path}: a float32 vector was expected at byte {info.offset_bytes}")
    with info.path.open("rb") as file:
        file.seek(info.offset_bytes)
        data = file.read(4 * info.shape[0])
    if len(data) != 4 * info.shape[0]:
        raise LoadError(f"{info.path}: the file ends inside its tensor data")
    return struct.unpack(f"<{info.shape[0]}f", data)


def _other_parts(path: Path, num_parts: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != num_parts:
        raise LoadError(f"{path}: one of {num_parts} parts; name the first, ...-00001-of-{num_parts:05d}.gguf")
    return [path.with_name(f"{match[1]}-{index:05d}-of-{num_parts:05d}.gguf") for index in range(2, num_parts + 1)]


def _read_part(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path), path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # an empty file cannot be mapped; text that is not UTF-8
        raise LoadError(f"{path}: not a GGUF file ({error})") from error


def _parse(cursor: "_Cursor", path: Path) -> GGUFHeader:
    if cursor.take(4) != b"GGUF":
        raise LoadError(f"{path}: not a GGUF file")
    version = cursor.unpack("I")
    if version not in (2, 3):
        order = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
        raise LoadError(f"{path}: GGUF version {version} is not supported, only 2 and 3{order}")
    num_tensors, num_entries = cursor.unpack("Q"), cursor.unpack("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I"))
    placed = [cursor.tensor_info() for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment < 1:
        raise LoadError(f"{path}: general.alignment is {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: GGUFTensorInfo(shape, kind, path, start + offset) for name, shape, kind, offset in placed}
    if len(tensors) != num_tensors:
        raise LoadError(f"{path}: two tensors have the same name")
    return GGUFHeader(metadata, tensors)


class _Cursor:
    """A position in the mapped file; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise LoadError(f"{self._path}: the file ends inside its header")
        chunk = self._data[self.position : end]
        self.position = end
        return chunk

    def unpack(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.unpack("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.unpack("I"), self.unpack("Q")
            return self._array(item_kind, count)
        return self.unpack(self._code(kind))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.unpack("I")
        if num_dims > _MAX_DIMS:
            raise LoadError(f"{self._path}: tensor {name} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        return name, tuple(reversed(dims)), self.unpack("I"), self.unpack("Q")

    def _array(self, item_kind: int, count: int) -> list[Any]:
        if item_kind == _STRING:
            return self._strings(count)
        if item_kind == _ARRAY:
            raise LoadError(f"{self._path}: an array of arrays at byte {self.position} is not supported")
        code = self._code(item_kind)
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands of entries, so this loop avoids a method call for each."""
        data, position, size = self._data, self.position, len(self._data)
        from_bytes = int.from_bytes
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + from_bytes(data[start - 8 : start], "little")
            if position > size:
                raise LoadError(f"{self._path}: the file ends inside its header")
            strings.append(data[start:position].decode())
        self.position = position
        return strings

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise LoadError(f"{self._path}: unknown metadata type {kind} at byte {self.position}")
        return _SCALARS[kind]
