"""How tokens are chosen, and when an answer ends."""

import json

from tests.server.conftest import Bench, text_of
from tests.server.fields.rows import ask, body, row, said

WILD = {"temperature": 2, "seed": 5}  # far from the script unless something narrows the choice


@row("temperature")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, temperature=0) == "hello"
    assert await said(bench, kind, **WILD, max_tokens=8) != "hello"
    shown = (await body(bench, kind, temperature=0.5))["sampling"]["temperature"]
    assert shown == {"value": 0.5, "source": "request"}


@row("top_p")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, **WILD, top_p=0.001) == "hello"


@row("top_k")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, **WILD, top_k=1) == "hello"
    off = [await said(bench, kind, **WILD, top_k=k, max_tokens=6) for k in (-1, 0)]
    assert off[0] == off[1] != "hello"


@row("min_p")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, **WILD, min_p=0.99) == "hello"


@row("typical_p")
async def _(bench: Bench, kind: str) -> None:
    free = await said(bench, kind, **WILD, max_tokens=8)
    assert await said(bench, kind, **WILD, max_tokens=8, typical_p=0.01) != free


@row("repetition_penalty")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, "SAY:aaaa|", repetition_penalty=1.0) == "aaaa"
    assert await said(bench, kind, "SAY:aaaa|", repetition_penalty=10.0, max_tokens=4) != "aaaa"


@row("frequency_penalty")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, "SAY:aaaa|", frequency_penalty=0.25) == "aaaa"
    assert await said(bench, kind, "SAY:aaaa|", frequency_penalty=2.0, max_tokens=4) != "aaaa"
    assert await said(bench, kind, "SAY:abcd|", frequency_penalty=2.0) == "abcd"


@row("presence_penalty")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, "SAY:aaaa|", presence_penalty=2.0, max_tokens=4) != "aaaa"
    assert await said(bench, kind, "SAY:abcd|", presence_penalty=2.0) == "abcd"


@row("seed")
async def _(bench: Bench, kind: str) -> None:
    texts = [await said(bench, kind, temperature=2, seed=seed, max_tokens=8) for seed in (1, 1, 2, -(2**63))]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    answers = [await body(bench, kind, temperature=2, max_tokens=8) for _ in range(2)]
    chosen = answers[0]["sampling"]["seed"]
    assert chosen["source"] == "server"
    assert chosen != answers[1]["sampling"]["seed"]
    again = await body(bench, kind, temperature=2, max_tokens=8, seed=chosen["value"])
    assert again["choices"] == answers[0]["choices"], "the reported seed must give the same answer"


@row("logit_bias")
async def _(bench: Bench, kind: str) -> None:
    assert not (await said(bench, kind, logit_bias={str(ord("h")): -100}, max_tokens=1)).startswith("h")
    assert await said(bench, kind, logit_bias={str(ord("z")): 100}, max_tokens=3) == "zzz"


@row("allowed_token_ids")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, allowed_token_ids=[ord("x")], max_tokens=3) == "xxx"


@row("bad_words")
async def _(bench: Bench, kind: str) -> None:
    text = await said(bench, kind, bad_words=["ell"], max_tokens=5)
    assert text.startswith("hel")
    assert "ell" not in text


@row("n")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, n=3, temperature=2, seed=1, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = {json.dumps({**choice, "index": 0}) for choice in answer["choices"]}
    assert len(texts) == 3, "one seed gives different choices"
    assert (await body(bench, kind, n=3, temperature=2, seed=1, max_tokens=8))["choices"] == answer["choices"]
    equal = await body(bench, kind, n=2)
    assert equal["usage"]["completion_tokens"] == 2 * 6, "n equal answers at temperature 0, end token included"


@row("max_tokens")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    clamped = await body(bench, kind, max_tokens=10**6)
    warning = next(item for item in clamped["warnings"] if item["param"] == "max_tokens")
    assert warning["given"] == 10**6
    assert warning["used"] == clamped["sampling"]["max_tokens"]["value"] == 1024 - clamped["usage"]["prompt_tokens"]


@row("min_tokens")
async def _(bench: Bench, kind: str) -> None:
    assert (await body(bench, kind, "SAY:|"))["usage"]["completion_tokens"] == 1
    assert (await body(bench, kind, "SAY:|", min_tokens=3, max_tokens=9))["usage"]["completion_tokens"] > 3


@row("stop")
async def _(bench: Bench, kind: str) -> None:
    answer = await ask(bench, kind, "SAY:hello world|", stop=["nope", "o w"])
    choice = answer.json()["choices"][0]
    assert text_of(answer) == "hell"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "o w")
    assert await said(bench, kind, stop="hel") == ""
    assert await said(bench, kind, stop="lox") == "hello", "held-back text comes when it is no stop"


@row("stop_token_ids")
async def _(bench: Bench, kind: str) -> None:
    choice = (await body(bench, kind, stop_token_ids=[ord("l")]))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("l"))
    assert await said(bench, kind, stop_token_ids=[ord("l")]) == "he"


@row("ignore_eos")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, ignore_eos=True, max_tokens=9)
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["finish_reason"] == "length"


@row("include_stop_str_in_output")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, stop=["el"], include_stop_str_in_output=True) == "hel"
    assert await said(bench, kind, stop=["el"], include_stop_str_in_output=False) == "h"
