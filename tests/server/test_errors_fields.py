"""Wrong values field by field, fields that are refused by name, and fuzzed bodies: always a 400, never a 5xx."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.openai.schema.requests import ChatRequest, CompletionRequest
from tests.server.conftest import Bench
from tests.server.test_errors import CHAT, COMPLETIONS, invalid

WRONG_VALUES = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -5),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("min_p", -0.1),
    ("typical_p", 0),
    ("repetition_penalty", 0),
    ("frequency_penalty", -3),
    ("presence_penalty", 2.5),
    ("seed", 2**63),
    ("min_tokens", 2**63),
    ("min_tokens", 2**62),  # more than the context has room for, max_tokens given or not
    ("seed", 1.5),
    ("n", 0),
    ("n", -1),
    ("n", 100_000),
    ("n", "2"),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 4.5),
    ("min_tokens", -1),
    ("min_tokens", 50_000),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", 7),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("bad_words", [""]),
    ("stream", 1),
    ("prompt_logprobs", 21),
    ("response_format", {"type": "yaml"}),
    ("response_format", "json"),
    ("structured_outputs", {}),
    ("cache_salt", ""),
    ("timeout_ms", 0),
    ("queue_timeout_ms", -1),
    ("priority", "high"),
    ("truncate_prompt_tokens", -2),
    ("model", 7),
    ("metadata", [1]),
    ("service_tier", "gold"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), WRONG_VALUES, ids=str)
async def test_a_wrong_value_is_a_400_that_names_the_field(bench: Bench, path: str, field: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    error = invalid(await bench.post(path, {"max_tokens": 4, **body, field: value}))
    assert error["param"].split(".")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
    ],
)
async def test_a_field_that_would_change_the_meaning_is_refused(bench: Bench, field: str, value: Any) -> None:
    invalid(await bench.chat("a", **{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value"), [("functions", None), ("modalities", ["text"]), ("use_beam_search", False)]
)
async def test_unless_it_asks_for_nothing(bench: Bench, field: str, value: Any) -> None:
    assert (await bench.chat("SAY:a|", **{field: value})).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70000) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


async def test_fuzzed_bodies_never_get_a_5xx(bench: Bench) -> None:
    names = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"timeout_ms", "queue_timeout_ms"})
    bodies: list[tuple[str, dict[str, Any]]] = []

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from([CHAT, COMPLETIONS]), st.dictionaries(st.sampled_from(names), JSON, max_size=4), st.booleans()
    )
    def collect(path: str, fields: dict[str, Any], keep_prompt: bool) -> None:
        prompt = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
        bodies.append((path, {"max_tokens": 2, **(prompt if keep_prompt else {}), **fields}))

    collect()
    for path, body in bodies:
        raw = json.dumps(body).encode()
        answer = await bench.client.post(path, content=raw)
        assert answer.status_code < 500, (path, body, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error"}
