"""Replies come back with the tokens they were made of: same text, other spelling, whatever happened to the text."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.replies import ENTRY_BYTES, MAX_REPLIES_PER_SITE, RecalledPrompt, ReplyMemory, spell
from tests.fakes.byte_tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID, byte_tokenizer

TOKENIZER = byte_tokenizer((b"hello", b"llo", b"he", b"o w", b"ld"))  # words that encoding never makes
HELLO, LLO, HE, O_W, LD = range(FIRST_WORD_ID, FIRST_WORD_ID + 5)
NAMESPACE = b"model"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def prompt_of(*turns: str) -> str:
    """Turns of user and assistant, the assistant's next one opened."""
    names = ("user", "bot")
    return "".join(f"<|bos|>{names[i % 2]}\n{turn}<|eos|>" for i, turn in enumerate(turns)) + "<|bos|>bot\n"


def recall(memory: ReplyMemory, text: str, namespace: bytes = NAMESPACE) -> RecalledPrompt:
    return memory.recall(spell(TOKENIZER, namespace, ids(text)))


def say(memory: ReplyMemory, text: str, reply: Sequence[int], namespace: bytes = NAMESPACE) -> list[int]:
    """One answered request: its whole sequence."""
    prompt = recall(memory, text, namespace)
    assert prompt.site is not None
    memory.remember(prompt.site, reply)
    return [*prompt.token_ids, *reply]


def spelled(token_ids: Sequence[int]) -> bytes:
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in token_ids)


@pytest.fixture
def memory() -> ReplyMemory:
    return ReplyMemory(TOKENIZER, 1 << 20)


def test_the_next_turn_begins_with_the_last_one_exactly(memory: ReplyMemory) -> None:
    first = say(memory, prompt_of("hi"), [HE, LLO, *ids(" world"), EOS_ID])
    second = recall(memory, prompt_of("hi", "hello world", "and?")).token_ids
    assert list(second[: len(first)]) == first
    assert list(second[len(first) :]) == ids("<|bos|>user\nand?<|eos|><|bos|>bot\n")
    assert spelled(second) == prompt_of("hi", "hello world", "and?").encode()


def test_every_turn_of_a_long_conversation(memory: ReplyMemory) -> None:
    replies = ([HELLO, EOS_ID], [HE, LLO, O_W, EOS_ID], [LD, LD, EOS_ID])
    turns, whole = ["one"], list[int]()
    for reply in replies:
        sequence = say(memory, prompt_of(*turns), reply)
        assert sequence[: len(whole)] == whole
        whole = sequence
        turns += [TOKENIZER.decode(reply), "more"]
    assert list(recall(memory, prompt_of(*turns)).token_ids[: len(whole)]) == whole


def test_an_older_turn_can_be_asked_differently(memory: ReplyMemory) -> None:
    first = say(memory, prompt_of("hi"), [HELLO, EOS_ID])
    say(memory, prompt_of("hi", "hello", "and?"), [LD, EOS_ID])
    other = recall(memory, prompt_of("hi", "hello", "or?")).token_ids
    assert list(other[: len(first)]) == first


CUTS = {
    "no stop token yet": ([HE, LLO], "hello"),
    "a stop string took the end": ([HELLO, O_W, *ids("orld"), EOS_ID], "hello"),
    "trimmed by the template": ([HELLO, *ids("  \n"), EOS_ID], "hello"),
    "the client wrote on": ([HELLO, EOS_ID], "hello you"),
}


@pytest.mark.parametrize(("reply", "text"), CUTS.values(), ids=CUTS)
def test_a_changed_end_loses_only_the_end(memory: ReplyMemory, reply: list[int], text: str) -> None:
    say(memory, prompt_of("hi"), reply)
    got = recall(memory, prompt_of("hi", text, "and?")).token_ids
    start = len(ids(prompt_of("hi")))
    kept = [HE, LLO] if reply[0] == HE else [HELLO]
    assert list(got[start : start + len(kept)]) == kept
    assert spelled(got) == prompt_of("hi", text, "and?").encode()


def test_a_cut_inside_a_token_falls_back_to_the_token_before(memory: ReplyMemory) -> None:
    say(memory, prompt_of("hi"), [HE, LLO, EOS_ID])
    got = recall(memory, prompt_of("hi", "hell", "and?")).token_ids
    assert list(got) == [*ids(prompt_of("hi")), HE, *ids("ll<|eos|><|bos|>user\nand?<|eos|><|bos|>bot\n")]


def test_a_reply_the_client_goes_on_with(memory: ReplyMemory) -> None:
    """The last message continued: what was drawn before stays, and the next turn knows the joined reply."""
    say(memory, prompt_of("hi"), [HELLO])
    second = say(memory, prompt_of("hi") + "hello", [O_W, EOS_ID])
    assert second == [*ids(prompt_of("hi")), HELLO, O_W, EOS_ID]
    assert list(recall(memory, prompt_of("hi", "helloo w", "x")).token_ids[: len(second)]) == second


@pytest.mark.parametrize(
    "text",
    [prompt_of("hi", "jello", "and?"), prompt_of("ho", "hello", "and?"), prompt_of("hi"), "hello", ""],
)
def test_other_conversations_are_left_alone(memory: ReplyMemory, text: str) -> None:
    say(memory, prompt_of("hi"), [HELLO, EOS_ID])
    assert list(recall(memory, text).token_ids) == ids(text)


def test_namespaces_know_nothing_of_each_other(memory: ReplyMemory) -> None:
    say(memory, prompt_of("hi"), [HELLO, EOS_ID])
    text = prompt_of("hi", "hello", "x")
    assert list(recall(memory, text, b"other salt").token_ids) == ids(text)
    assert HELLO in recall(memory, text).token_ids


def test_of_several_answers_the_one_sent_back_counts(memory: ReplyMemory) -> None:
    for reply in ([HE, LLO, EOS_ID], [HELLO, LD, EOS_ID], [*ids("no"), EOS_ID]):
        say(memory, prompt_of("hi"), reply)
    start = len(ids(prompt_of("hi")))
    for text, reply in (("hellold", [HELLO, LD]), ("no", ids("no")), ("hello", [HE, LLO])):
        assert list(recall(memory, prompt_of("hi", text, "x")).token_ids[start:][: len(reply)]) == reply


def test_control_tokens_equal_only_themselves() -> None:
    """A reply that spells a control token letter by letter does not stand for one."""
    memory = ReplyMemory(TOKENIZER, 1 << 20)
    prompt = memory.recall(spell(TOKENIZER, NAMESPACE, ids(prompt_of("hi"))))
    assert prompt.site is not None
    letters = [*b"<|eos|>"]
    memory.remember(prompt.site, [HELLO, *letters, HELLO])
    got = recall(memory, prompt_of("hi", "hello<|eos|>hello", "x")).token_ids
    start = len(ids(prompt_of("hi")))
    assert list(got[start : start + 2]) == [HELLO, EOS_ID]


def test_a_prompt_without_a_control_token_near_its_end_has_no_site(memory: ReplyMemory) -> None:
    assert recall(memory, "plain text").site is None
    assert recall(memory, "<|bos|>" + "x" * 64).site is None
    assert recall(memory, "<|bos|>" + "x" * 63).site is not None


def test_the_least_recently_used_is_forgotten_first() -> None:
    memory = ReplyMemory(TOKENIZER, 3 * (ENTRY_BYTES + 4 * 8))
    for name in "abc":
        say(memory, prompt_of(name), [HELLO, EOS_ID])
    assert len(memory) == 3
    assert HELLO in recall(memory, prompt_of("a", "hello", "x")).token_ids
    say(memory, prompt_of("d"), [HELLO, EOS_ID])
    known = [name for name in "abcd" if HELLO in recall(memory, prompt_of(name, "hello", "x")).token_ids]
    assert known == ["a", "c", "d"]
    assert memory.num_bytes == 3 * (ENTRY_BYTES + 4 * 7)


def test_one_prompt_keeps_a_bounded_number_of_replies(memory: ReplyMemory) -> None:
    for number in range(3 * MAX_REPLIES_PER_SITE):
        say(memory, prompt_of("hi"), [HELLO, number, EOS_ID])
    say(memory, prompt_of("hi"), [HELLO, number, EOS_ID])
    assert len(memory) == MAX_REPLIES_PER_SITE
    assert memory.num_bytes == MAX_REPLIES_PER_SITE * (ENTRY_BYTES + 4 * 8)


# What models draw: any tokens, control tokens and broken characters among them.
drawn = st.lists(st.one_of(st.sampled_from([HELLO, LLO, HE, O_W, LD, EOS_ID, BOS_ID]), st.integers(0, 255)), max_size=8)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(drawn, st.integers(0, 6)), min_size=1, max_size=5), st.integers(0, 3))
def test_whatever_was_said_the_text_stays_and_the_beginning_is_exact(
    rounds: list[tuple[list[int], int]], num_cut: int
) -> None:
    """`num_cut` characters of each reply are lost on the way back through the client."""
    memory = ReplyMemory(TOKENIZER, 1 << 20)
    turns, whole = ["hi"], list[int]()
    for reply, _ in rounds:
        text = prompt_of(*turns)
        got = recall(memory, text)
        assert spelled(got.token_ids) == spelled(ids(text))
        assert [i for i in got.token_ids if i in TOKENIZER.added_ids] == [i for i in ids(text) if i > 255]
        if whole:
            assert list(got.token_ids[: len(whole)]) == whole
        assert got.site is not None
        memory.remember(got.site, [*reply, EOS_ID])
        shown = TOKENIZER.decode(reply)
        is_whole = num_cut == 0 and shown.encode() == spelled(reply) and not set(reply) & TOKENIZER.added_ids
        whole = [*got.token_ids, *reply, EOS_ID] if is_whole and "<|" not in shown else []
        turns += [shown[: len(shown) - num_cut] if num_cut else shown, "more"]
