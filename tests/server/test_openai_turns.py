"""A conversation's next turn finds all of the last one's KV, though its reply was no canonical spelling of its text."""

from contextlib import aclosing
from typing import Any

import pytest

from server.openai.chat import ChatWire, plan_chat
from server.openai.generation import Generation
from server.openai.schema.requests import ChatRequest
from server.openai.settings import SeedSource
from server.openai.translate import Arrival, Target
from server.text.replies import ReplyMemory
from tests.fakes.byte_tokenizer import EOS_ID, FIRST_WORD_ID, byte_tokenizer
from tests.server.conftest import Bench, running, text_of

WORDS = (b"hel", b"lo the", b"re, friend", b" of mine", b" and so on")
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
REPLY = [FIRST_WORD_ID + i for i in (0, 1, 2, 3)] + [ord("!")] * 30 + [FIRST_WORD_ID + 4, EOS_ID]
BLOCK_SIZE = 16
QUESTION = {"role": "user", "content": "Say something that is long enough for a few blocks of sixteen tokens."}


def open_house(**settings: Any) -> Any:
    """A server whose model always says REPLY."""
    replies = ReplyMemory(byte_tokenizer(WORDS), 1 << 20)
    return running(
        template=TEMPLATE, words=WORDS, engine={"script": lambda prompt: REPLY}, served={"replies": replies}, **settings
    )


async def second_turn(bench: Bench, reply: str, **fields: Any) -> dict[str, Any]:
    messages = [QUESTION, {"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
    answer = await bench.chat(messages, max_tokens=100, return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_reuses_the_whole_last_one(stream: bool) -> None:
    async with open_house() as bench:
        body = {"messages": [QUESTION], "temperature": 0, "max_tokens": 100}
        if stream:
            events = await bench.events("/v1/chat/completions", body)
            deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
            reply = "".join(delta.get("content", "") for delta in deltas)
        else:
            reply = text_of(await bench.post("/v1/chat/completions", body))
        first_prompt = bench.engine.starts[-1].prompt_ids
        answer = await second_turn(bench, reply)
        assert list(answer["prompt_token_ids"][: len(first_prompt) + len(REPLY)]) == [*first_prompt, *REPLY]
        # the last drawn token was never computed; whole blocks are what can be found
        whole_turn = (len(first_prompt) + len(REPLY) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_turn
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


async def test_without_the_memory_the_cache_ends_where_the_spellings_part() -> None:
    """What the memory is for: the same conversation, its reply encoded anew."""
    async with running(template=TEMPLATE, words=WORDS, engine={"script": lambda prompt: REPLY}) as bench:
        reply = text_of(await bench.chat([QUESTION], max_tokens=100))
        first_prompt = bench.engine.starts[-1].prompt_ids
        answer = await second_turn(bench, reply)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first_prompt) // BLOCK_SIZE * BLOCK_SIZE


async def test_a_third_turn_and_text_completions_too() -> None:
    """The same text as a plain prompt: it is the text that counts, not the endpoint."""
    async with open_house() as bench:
        reply = text_of(await bench.chat([QUESTION], max_tokens=100))
        second = await second_turn(bench, reply)
        prompt = second["prompt_token_ids"]
        text = byte_tokenizer(WORDS).decode([*prompt, *REPLY], skip_special_tokens=False)
        answer = (await bench.complete(text, max_tokens=1, return_token_ids=True)).json()
        assert answer["choices"][0]["prompt_token_ids"] == [*prompt, *REPLY]


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0}, {"cache_salt": "other"}], ids=["scored text", "another salt"]
)
async def test_the_text_keeps_its_own_spelling(fields: dict[str, Any]) -> None:
    async with open_house() as bench:
        reply = text_of(await bench.chat([QUESTION], max_tokens=100))
        answer = await second_turn(bench, reply, **fields)
        assert not set(answer["prompt_token_ids"]) & set(REPLY[:4])


async def test_token_ids_stay_what_they_are() -> None:
    async with open_house() as bench:
        reply = text_of(await bench.chat([QUESTION], max_tokens=100))
        text = f"<|bos|>user\n{QUESTION['content']}<|eos|><|bos|>assistant\n{reply}<|eos|>"
        ids = byte_tokenizer(WORDS).encode(text, add_special_tokens=False)
        await bench.complete(ids, max_tokens=1)
        assert list(bench.engine.starts[-1].prompt_ids) == ids


CUTS = {"length": ({"max_tokens": 3}, "hello there, friend", 3), "stop": ({"stop": ["nd"]}, "hello there, frie", 2)}


@pytest.mark.parametrize(("fields", "text", "num_kept"), CUTS.values(), ids=CUTS)
async def test_a_reply_that_was_cut(fields: dict[str, Any], text: str, num_kept: int) -> None:
    async with open_house() as bench:
        assert text_of(await bench.chat([QUESTION], **{"max_tokens": 100, **fields})) == text
        first_prompt = bench.engine.starts[-1].prompt_ids
        got = (await second_turn(bench, text))["prompt_token_ids"]
        assert list(got[: len(first_prompt) + num_kept]) == [*first_prompt, *REPLY[:num_kept]]


async def test_what_a_client_that_left_had_got_is_kept() -> None:
    async with open_house() as bench:
        served, config = bench.state.served, bench.state.config
        body = ChatRequest.model_validate({"messages": [QUESTION], "temperature": 0, "stream": True})
        plan = await plan_chat(body, Arrival("r", 0.0), Target(served, config, SeedSource(0)))
        with Generation(plan, ChatWire(), served, lambda _: None) as generation:
            async with aclosing(generation.chunks()) as chunks:
                async for chunk in chunks:
                    if any("friend" in choice["delta"].get("content", "") for choice in chunk.choices):
                        break
            assert generation.num_output_tokens < len(REPLY)
        first_prompt = bench.engine.starts[-1].prompt_ids
        got = (await second_turn(bench, "hello there, friend"))["prompt_token_ids"]
        assert list(got[: len(first_prompt) + 3]) == [*first_prompt, *REPLY[:3]]
