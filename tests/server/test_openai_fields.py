"""Each field of the contract's list changes something over HTTP, and no declared field goes without proof."""

import pytest

from server.openai.schema.formats import StreamOptions, StructuredOutputs
from server.openai.schema.requests import ChatRequest, CompletionRequest
from tests.server.conftest import Bench
from tests.server.fields import chat, completions, output, sampling, serving
from tests.server.fields.rows import KINDS, ROWS

THEMES = (sampling, output, serving, chat, completions)  # importing them fills ROWS


@pytest.mark.parametrize(("kind", "field"), sorted(ROWS))
async def test_field_has_its_effect(bench: Bench, kind: str, field: str) -> None:
    await ROWS[kind, field](bench, kind)


def declared(kind: str) -> set[str]:
    model = ChatRequest if kind == "chat" else CompletionRequest
    names = set(model.model_fields)
    names |= {f"stream_options.{name}" for name in StreamOptions.model_fields}
    return names | {f"structured_outputs.{name.rstrip('_')}" for name in StructuredOutputs.model_fields}


@pytest.mark.parametrize("kind", KINDS)
def test_every_declared_field_has_a_row(kind: str) -> None:
    assert declared(kind) == {field for row_kind, field in ROWS if row_kind == kind}
