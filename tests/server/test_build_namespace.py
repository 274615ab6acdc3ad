"""What keeps two KV caches apart: any of model, tokenizer, template, layout, number type, and what KV is stored as."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.layout import KVLayout
from server.build import _namespace

INFO = {"layout": KVLayout(2, 1, 8, 16, 1, 2), "dtype": "float32", "kv_dtype": "int8"}


def namespace(path: str = "m", fingerprint: str = "t", template: str = "x", **info: Any) -> tuple[str, ...]:
    loaded: Any = SimpleNamespace(
        source=SimpleNamespace(path=Path(path), name=path, kind="gguf"),
        tokenizer=SimpleNamespace(fingerprint=fingerprint),
        template=SimpleNamespace(source=template),
        engine=SimpleNamespace(info=SimpleNamespace(**{**INFO, **info})),
        engine_config=SimpleNamespace(quantization="auto"),
    )
    return _namespace(loaded)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "n"},
        {"fingerprint": "u"},
        {"template": "y"},
        {"layout": KVLayout(2, 1, 8, 16, 4)},
        {"dtype": "bfloat16"},
        {"kv_dtype": "float8_e4m3fn"},  # the same layout as int8
    ],
    ids=str,
)
def test_each_part_counts(change: dict[str, Any]) -> None:
    assert namespace() == namespace()
    assert namespace(**change) != namespace()
