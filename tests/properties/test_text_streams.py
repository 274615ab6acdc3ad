"""Random bytes, random text, random cuts: what is streamed joins to the whole, and shows nothing it must not."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import example, given, settings

from engine.batch import TokenLogprob
from scheduler.handle import TokenEvent
from scheduler.request import FinishReason
from server.text.choice import ChoiceText, TextOptions
from server.text.detokenizer import Detokenizer
from server.text.stop import StopMatcher
from server.text.tokenizer import Tokenizer
from tests.fakes.byte_tokenizer import CALL_ID, EOS_ID, FIRST_WORD_ID, byte_tokenizer
from tests.fakes.smollm2 import smollm2_tokenizer
from tests.server.test_text_tokenizer import spm_metadata

WORDS = (b"ab", b"ba", b"\xf0\x9f", b"\x8e\x89", b"\x89a", b" the", b"b\xe2\x80", b"\xed\xa0", b"\xef\xbf\xbd")
TOKENIZER = byte_tokenizer(WORDS)
SENTENCEPIECE = Tokenizer.from_gguf(spm_metadata())

TEXT = st.text(alphabet=st.one_of(st.sampled_from("abcé\U0001f389\u200d "), st.characters(exclude_categories=["Cs"])))
FEW = st.text(alphabet="abé\U0001f389", min_size=0, max_size=40)
STOPS = st.lists(st.text(alphabet="abé\U0001f389", min_size=1, max_size=6), max_size=16)
TOKEN = st.one_of(
    st.integers(0, 255),
    st.sampled_from([*b"abab", 0xF0, 0x9F, 0x8E, 0x89, 0xC3, 0xA9, 0xED]),
    st.integers(FIRST_WORD_ID, FIRST_WORD_ID + len(WORDS) - 1),
    st.sampled_from([CALL_ID, EOS_ID]),
)


def cut(draw_cuts: list[int], length: int) -> list[slice]:
    bounds = sorted({0, length, *(at % (length + 1) for at in draw_cuts)})
    return [slice(a, b) for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 10**6), max_size=12)


# ---------------------------------------------------------------- detokenizing


@given(st.lists(TOKEN, max_size=60), st.booleans())
@settings(deadline=None, max_examples=300)
def test_deltas_join_to_the_whole(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    parts = [detokenizer.push(token_id) for token_id in ids]
    before_the_end = "".join(parts)
    text = before_the_end + detokenizer.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_chars == len(text)
    shown = [i for i in ids if not (skip and i in TOKENIZER.special_ids)]
    whole = b"".join(map(TOKENIZER.token_bytes, shown))
    assert text == whole.decode("utf-8", errors="replace")
    assert len(text) - len(before_the_end) <= (
        2 if whole[-2:-1] == b"\xed" else 1
    )  # a lone surrogate's beginning is two


@given(TEXT)
@settings(deadline=None)
def test_no_replacement_character_that_the_text_does_not_hold(text: str) -> None:
    text = text.replace("\ufffd", "")
    for tokenizer in (TOKENIZER, smollm2_tokenizer(), SENTENCEPIECE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        parts = [detokenizer.push(token_id) for token_id in ids]
        parts.append(detokenizer.flush())
        if tokenizer is TOKENIZER:
            assert not any("\ufffd" in part for part in parts)
            assert "".join(parts) == text
        elif tokenizer is SENTENCEPIECE:
            assert "".join(parts) == (" " + text if text else "")


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_pass_through_sentencepiece_fallback(data: bytes) -> None:
    ids = [3 + byte for byte in data]
    detokenizer = Detokenizer(SENTENCEPIECE)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == data.decode("utf-8", errors="replace")


# ---------------------------------------------------------------- stop strings


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look at every prefix in turn: the first that ends with a stop string ends the text there (the longest such)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def naive_held(text: str, stops: list[str]) -> int:
    """How much of the end of `text` begins a stop string."""
    return max((n for n in range(1, len(text) + 1) for stop in stops if stop.startswith(text[-n:])), default=0)


@given(FEW, STOPS, CUTS, st.booleans())
@settings(deadline=None, max_examples=500)
def test_stop_matching_is_the_naive_one(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    want, matched = naive(text, stops, include)
    shown = taken = ""
    for part in cut(cuts, len(text)):
        shown += matcher.push(text[part])
        taken += text[part]
        if matcher.matched is None:
            assert len(taken) - len(shown) == matcher.num_held == naive_held(taken, stops)
    assert (shown + matcher.flush(), matcher.matched) == (want, matched)


# ---------------------------------------------------------------- a whole choice


@given(st.lists(TOKEN, max_size=40), STOPS, CUTS, st.booleans(), st.booleans())
@example([0xED, 0xA0, CALL_ID], [], [1, 2], False, True)  # two replacements pending at once
@settings(deadline=None, max_examples=400)
def test_a_choice_shows_the_same_whatever_the_cuts(
    ids: list[int], stops: list[str], cuts: list[int], include: bool, skip: bool
) -> None:
    options = TextOptions(stops=tuple(stops), include_stop=include, skip_special_tokens=skip)
    choice, unlisted = ChoiceText(TOKENIZER, options, None), ChoiceText(TOKENIZER, options, None, lists_tokens=False)
    parts = cut(cuts, len(ids))
    content, tokens, stop_string, num_finished = "", [], None, 0
    for index, part in enumerate([*parts, slice(0, 0)]):
        reason = FinishReason.LENGTH if index == len(parts) else None
        event = TokenEvent(0, tuple(ids[part]), tuple(TokenLogprob(i, -1.0, 1) for i in ids[part]), reason)
        delta = choice.push(event)
        assert unlisted.push(event) == replace(delta, tokens=())
        content += delta.pieces.content
        tokens += delta.tokens
        stop_string = stop_string or delta.stop_string
        num_finished += delta.finished
        assert all(token.text_offset <= len(content) for token in delta.tokens)
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    want, matched = naive(whole, stops, include)
    assert (content, stop_string, num_finished) == (want, matched, 1)
    if matched is not None and not include:
        assert not any(stop in content for stop in stops)
    assert [token.token_id for token in tokens] == ids[: len(tokens)]
    assert len(tokens) <= choice.num_tokens == unlisted.num_tokens
    if matched is None:
        assert len(tokens) == choice.num_tokens == len(ids)
    check_alignment(content, whole, tokens, ids)


def check_alignment(content: str, whole: str, tokens: list, ids: list[int]) -> None:
    """A token of whole characters stands where its offset says; offsets never go back; the kept tokens spell it all."""
    offsets = [token.text_offset for token in tokens]
    assert offsets == sorted(offsets)
    for token in tokens:
        text = token.bytes.decode("utf-8", errors="ignore")
        if text.encode() == token.bytes and token.token_id not in (CALL_ID, EOS_ID):
            assert whole.startswith(text, token.text_offset)
    if len(tokens) < len(ids):
        spelt = TOKENIZER.decode([token.token_id for token in tokens], skip_special_tokens=False)
        assert len(spelt) >= len(content.rstrip("\ufffd"))
