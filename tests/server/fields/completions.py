"""Fields of completions alone."""

from tests.server.conftest import Bench
from tests.server.fields.rows import ask, body, completion_row


@completion_row("prompt")
async def _(bench: Bench, kind: str) -> None:
    ids = list(b"SAY:ab|")
    for prompt, want in (
        ("SAY:hello|", ["hello"]),
        (ids, ["ab"]),
        (["SAY:x|", "SAY:y|"], ["x", "y"]),
        ([ids, ids], ["ab", "ab"]),
        (["SAY:x|", ids], ["x", "ab"]),
    ):
        assert [choice["text"] for choice in (await body(bench, kind, prompt))["choices"]] == want


@completion_row("best_of")
async def _(bench: Bench, kind: str) -> None:
    drawn = await body(bench, kind, n=4, logprobs=0, temperature=1, seed=3, max_tokens=5)
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])
        for choice in drawn["choices"]
    }
    best = await body(bench, kind, n=2, best_of=4, temperature=1, seed=3, max_tokens=5)
    assert [choice["text"] for choice in best["choices"]] == sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"] == drawn["usage"], "everything drawn is counted"
    assert (await ask(bench, kind, best_of=1, n=2)).json()["error"]["param"] == "best_of"
    assert (await ask(bench, kind, best_of=2, stream=True)).json()["error"]["param"] == "best_of"


@completion_row("logprobs")
async def _(bench: Bench, kind: str) -> None:
    logprobs = (await body(bench, kind, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*"hello", "<|eos|>"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert (await ask(bench, kind, logprobs=21)).json()["error"]["param"] == "logprobs"


@completion_row("suffix")
async def _(bench: Bench, kind: str) -> None:
    assert (await ask(bench, kind, suffix="end")).json()["error"]["param"] == "suffix"
    assert (await ask(bench, kind, suffix="")).status_code == 200
