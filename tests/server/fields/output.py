"""How an answer is written down, and what it is held to."""

import dataclasses
import json
from typing import Any

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from server.text.tokenizer import Tokenizer
from tests.fakes.byte_tokenizer import CALL_ID, EOS_ID
from tests.server.conftest import Bench, running, text_of
from tests.server.fields.rows import (
    SCHEMA,
    ask,
    body,
    chat_row,
    completion_row,
    counts,
    fits,
    names,
    prompt_of,
    row,
    said,
    stream,
)


@row("stream")
async def _(bench: Bench, kind: str) -> None:
    events = await stream(bench, kind)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    assert len(events) > 5


@row("stream_options")
async def _(bench: Bench, kind: str) -> None:
    for options in ({}, {"include_usage": False}, None):
        events = (await stream(bench, kind, stream_options=options))[:-1]
        assert all(event["choices"] and "usage" not in event for event in events)


@row("stream_options.include_usage")
async def _(bench: Bench, kind: str) -> None:
    *early, last, _done = await stream(bench, kind, stream_options={"include_usage": True})
    assert all(event["usage"] is None and event["choices"] for event in early)
    assert last["choices"] == []
    assert counts(last) == counts(await body(bench, kind))
    assert set(last["timings"]) == {"queue_ms", "prefill_ms", "decode_ms"}


@row("stream_options.continuous_usage_stats")
async def _(bench: Bench, kind: str) -> None:
    events = (await stream(bench, kind, stream_options={"continuous_usage_stats": True}))[:-1]
    sizes = [event["usage"]["completion_tokens"] for event in events]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 6


@row("stream_options.include_obfuscation")
async def _(bench: Bench, kind: str) -> None:
    events = (await stream(bench, kind, stream_options={"include_obfuscation": True}))[:-1]
    assert all(event["obfuscation"] for event in events)
    assert len({len(event["obfuscation"]) for event in events}) > 1


@chat_row("echo")
async def _(bench: Bench, kind: str) -> None:
    messages = [{"role": "user", "content": "SAY:hello|"}, {"role": "assistant", "content": "oh "}]
    assert text_of(await bench.chat(messages, echo=True, continue_final_message=True)) == "oh hello"
    assert names(await body(bench, kind, echo=True)) == {"echo"}


@completion_row("echo")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, echo=True) == "SAY:hello|hello"
    answer = await body(bench, kind, echo=True, max_tokens=0, logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == "SAY:hello|"
    assert answer["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == list(range(10))


@row("skip_special_tokens")
async def _(bench: Bench, kind: str) -> None:
    bench.engine.script = lambda _: [ord("a"), CALL_ID, ord("b"), EOS_ID]
    assert await said(bench, kind) == "ab"
    assert await said(bench, kind, skip_special_tokens=False) == "a<|call|>b"


@row("spaces_between_special_tokens")
async def _(bench: Bench, kind: str) -> None:
    core = Core(models.WordLevel({"[UNK]": 0, "SAY": 1, ":": 2, "|": 3, "user": 4, "assistant": 5}, unk_token="[UNK]"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    core.add_special_tokens(["<a>", "<b>", "<eos>"])
    words = Tokenizer(core, {"eos_token": "<eos>"}, {})
    eos = words.token_id("<eos>")
    async with running() as other:
        other.engine.tokenizer, other.engine.eos_id = words, eos
        other.engine.script = lambda _: [words.token_id("<a>"), words.token_id("<b>"), eos]
        served = dataclasses.replace(other.state.served, tokenizer=words, stop_token_ids=frozenset({eos}))
        other.state.set_ready(served)
        shown = {"skip_special_tokens": False}
        assert await said(other, kind, **shown) == "<a> <b>"
        assert await said(other, kind, **shown, spaces_between_special_tokens=False) == "<a><b>"


@row("prompt_logprobs")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, prompt_logprobs=2)
    maps = answer["prompt_logprobs"] if kind == "chat" else answer["choices"][0]["prompt_logprobs"]
    assert len(maps) == answer["usage"]["prompt_tokens"]
    assert maps[0] is None
    for entry in maps[1:]:
        assert len(entry) in (2, 3)
        assert all(set(shown) == {"logprob", "rank", "decoded_token"} for shown in entry.values())
    assert "prompt_logprobs" not in json.dumps(await body(bench, kind))


def wants_logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": True} if kind == "chat" else {"logprobs": 0}


@row("logprob_token_ids")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, **wants_logprobs(kind), logprob_token_ids=[ord("z")])
    logprobs = answer["choices"][0]["logprobs"]
    if kind == "chat":
        assert all([top["token"] for top in entry["top_logprobs"]] == ["z"] for entry in logprobs["content"])
    else:
        assert all("z" in top for top in logprobs["top_logprobs"])
    assert (await ask(bench, kind, logprob_token_ids=[1])).status_code == 400


@row("return_token_ids")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [*b"hello", EOS_ID]
    assert "SAY:hello|" in await prompt_of(bench, kind)
    assert "token_ids" not in (await body(bench, kind))["choices"][0]


@row("return_tokens_as_token_ids")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, **wants_logprobs(kind), return_tokens_as_token_ids=True, max_tokens=1)
    logprobs = answer["choices"][0]["logprobs"]
    token = logprobs["content"][0]["token"] if kind == "chat" else logprobs["tokens"][0]
    assert token == f"token_id:{ord('h')}"


@row("response_format")
async def _(bench: Bench, kind: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert fits(await said(bench, kind, response_format=schema, max_tokens=60))
    assert await said(bench, kind, response_format={"type": "text"}) == "hello"
    start = await said(bench, kind, response_format={"type": "json_object"}, max_tokens=4)
    assert start.lstrip().startswith("{")


@row("structured_outputs", "structured_outputs.json")
async def _(bench: Bench, kind: str) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert fits(await said(bench, kind, structured_outputs={"json": schema}, max_tokens=60))
    for wrong in ({}, {"json": SCHEMA, "regex": "a"}):
        assert (await ask(bench, kind, structured_outputs=wrong)).status_code == 400


@row("structured_outputs.json_object")
async def _(bench: Bench, kind: str) -> None:
    assert (await said(bench, kind, structured_outputs={"json_object": True}, max_tokens=4)).lstrip().startswith("{")


@row("structured_outputs.regex")
async def _(bench: Bench, kind: str) -> None:
    text = await said(bench, kind, structured_outputs={"regex": "[0-9]{4}"}, max_tokens=9)
    assert len(text) == 4
    assert text.isdigit()


@row("structured_outputs.choice")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, structured_outputs={"choice": ["rain", "sun"]}, max_tokens=9) in ("rain", "sun")


@row("structured_outputs.grammar")
async def _(bench: Bench, kind: str) -> None:
    text = await said(bench, kind, structured_outputs={"grammar": 'start: "ab" | "cd"'}, max_tokens=9)
    assert text in ("ab", "cd")


@row("guided_json")
async def _(bench: Bench, kind: str) -> None:
    assert fits(await said(bench, kind, guided_json=SCHEMA, max_tokens=60))


@row("guided_regex")
async def _(bench: Bench, kind: str) -> None:
    assert (await said(bench, kind, guided_regex="[0-9]{2}", max_tokens=9)).isdigit()


@row("guided_choice")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, guided_choice=["rain", "sun"], max_tokens=9) in ("rain", "sun")


@row("guided_grammar")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, guided_grammar='start: "ab"', max_tokens=9) == "ab"
