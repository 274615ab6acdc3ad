"""Which attention backend is chosen, and what is said of those that were not."""

import logging
import sys
from types import MappingProxyType

import pytest
import torch

from engine.attention import optional, select
from engine.attention.interface import AttentionBackend, AttentionShape
from engine.attention.reference import ReferenceAttention
from engine.attention.select import BACKENDS, GPU_BACKENDS, select_attention
from engine.config import ATTENTION_BACKENDS
from engine.errors import LoadError
from engine.native import find_native
from kvpool.storage import KVStorage
from tests.conformance.test_attention_backends import Case, filled_storage
from tests.fakes.attention_libraries import fake_flash_attn, fake_flashinfer

SHAPE = AttentionShape(4, 0.25, (None, None))


def small_pool(block_size: int = 4, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> KVStorage:
    return filled_storage(Case([(0, 1)], head_dim=head_dim), block_size, dtype, seed=1)


def test_by_name_and_by_device() -> None:
    storage = small_pool()
    for name in BACKENDS:
        assert select_attention(name, storage, SHAPE).backend.name == name
    selection = select_attention("auto", storage, SHAPE)
    assert selection.backend.name == ("torch" if find_native() is None else "native")
    assert "cpu" in selection.reason.lower()


def test_the_log_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        selection = select_attention("auto", small_pool(), SHAPE)
    assert caplog.messages == [f"attention by {selection.backend.name}: {selection.reason}"]


def test_the_settings_know_the_names_there_are() -> None:
    assert (*BACKENDS, *GPU_BACKENDS) == ATTENTION_BACKENDS


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(LoadError, match=r"'flash'.*auto.*torch.*reference.*triton.*flashinfer.*flash-attn"):
        select_attention("flash", small_pool(), SHAPE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_a_library_asked_for_on_a_cpu_is_a_load_error(name: str, dtype: torch.dtype) -> None:
    storage = small_pool(block_size=256, head_dim=64, dtype=dtype)
    with pytest.raises(LoadError, match=f"'{name}' cannot serve here: {name} needs a CUDA device"):
        select_attention(name, storage, SHAPE)


@pytest.mark.parametrize(("name", "module"), [("flashinfer", "flashinfer"), ("flash-attn", "flash_attn")])
def test_a_library_asked_for_and_missing_is_a_load_error(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setattr(optional, "capability_of", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LoadError, match=f"'{name}' cannot serve here: {module} cannot be imported"):
        select_attention(name, small_pool(256, 64, torch.float16), SHAPE)


def test_a_library_asked_for_and_installed_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "capability_of", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    storage = small_pool(256, 64, torch.float16)
    for name in ("flashinfer", "flash-attn"):
        selection = select_attention(name, storage, SHAPE)
        assert (selection.backend.name, selection.reason) == (name, "chosen by name")


class CudaPool(KVStorage):
    """Says that it is on a GPU."""

    device = torch.device("cuda")


class Portable(ReferenceAttention):
    """In place of the torch backend, which would put its index arrays on that GPU."""

    name = "torch"


@pytest.mark.parametrize("num_refusing", [0, 1, 2, 3])
def test_auto_takes_the_first_that_serves_a_gpu_and_says_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch, num_refusing: int
) -> None:
    names = list(GPU_BACKENDS)
    assert names[0] == "triton"

    def refuse(storage: KVStorage, shape: AttentionShape) -> AttentionBackend:
        raise ValueError("not on this one")

    makers = [refuse] * num_refusing + [ReferenceAttention] * (len(names) - num_refusing)
    monkeypatch.setattr(select, "GPU_BACKENDS", MappingProxyType(dict(zip(names, makers, strict=True))))
    monkeypatch.setattr(select, "TorchPagedAttention", Portable)
    plain = small_pool()
    selection = select_attention("auto", CudaPool(plain.layout, 4, plain.dtype, torch.device("cpu")), SHAPE)
    assert selection.backend.name == ("torch" if num_refusing == len(names) else "reference")
    told = [name for name in names if f"{name} cannot: not on this one" in selection.reason]
    assert told == names[:num_refusing]
