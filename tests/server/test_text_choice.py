from collections.abc import Sequence

import pytest

from engine.batch import TokenLogprob
from scheduler.handle import TokenEvent
from scheduler.request import FinishReason
from server.text.choice import ChoiceDelta, ChoiceText, TextOptions, prompt_pieces
from server.text.pieces import TextPieces, TextRouter, ToolCallDelta
from server.text.tokenizer import Tokenizer
from tests.fakes.byte_tokenizer import BOS_ID, CALL_ID, EOS_ID, FIRST_WORD_ID, byte_tokenizer
from tests.fakes.smollm2 import smollm2_tokenizer
from tests.server.test_text_tokenizer import spm_metadata

PARTY = "\U0001f389"
ALPHABET = (b"DEF", b"GH", b"JK", b"LM", b"NO", b"OP", b"QR")
A_TO_R = "DEFGHIJKLMNOPQR"


def alphabet_tokenizer() -> tuple[Tokenizer, list[int]]:
    """DEF|GH|I|JK|LM|N|OP|QR."""
    tokenizer = byte_tokenizer(ALPHABET)
    word = {data.decode(): FIRST_WORD_ID + index for index, data in enumerate(ALPHABET)}
    return tokenizer, [word.get(text, ord(text[0])) for text in ("DEF", "GH", "I", "JK", "LM", "N", "OP", "QR")]


def events(ids: Sequence[int], finish: FinishReason | None, *, per_event: int = 1) -> list[TokenEvent]:
    parts = [tuple(ids[i : i + per_event]) for i in range(0, len(ids), per_event)] or [()]
    stop = ids[-1] if finish is FinishReason.STOP and ids else None
    return [
        TokenEvent(
            0,
            part,
            tuple(TokenLogprob(token_id, -0.5, 1) for token_id in part),
            finish_reason=finish if index == len(parts) - 1 else None,
            stop_token_id=stop if index == len(parts) - 1 else None,
        )
        for index, part in enumerate(parts)
    ]


def run(choice: ChoiceText, news: Sequence[TokenEvent]) -> ChoiceDelta:
    """All deltas, joined."""
    deltas = [choice.push(event) for event in news]
    assert sum(delta.finished for delta in deltas) <= 1
    return ChoiceDelta(
        sum((delta.pieces for delta in deltas), TextPieces()),
        tuple(token for delta in deltas for token in delta.tokens),
        next((delta.stop_string for delta in deltas if delta.stop_string is not None), None),
        any(delta.finished for delta in deltas),
    )


@pytest.mark.parametrize("per_event", [1, 3, 100])
@pytest.mark.parametrize(
    ("stops", "include", "text", "shown_tokens", "num_tokens"),
    [
        ((), False, A_TO_R, 8, 8),
        (("DEFGHIJ",), False, "", 0, 4),
        (("LMNO",), False, "DEFGHIJK", 4, 7),
        (("LMNO",), True, "DEFGHIJKLMNO", 7, 7),  # the last token is kept, being shown in part
        (("HIJ",), False, "DEFG", 2, 4),
        (("NEVER", "GHIJ", "XYZ"), False, "DEF", 1, 4),
        (("QRS",), False, A_TO_R, 8, 8),  # held back to the end, then released
    ],
)
def test_stop_strings_take_their_tokens_with_them(
    stops: tuple[str, ...], include: bool, text: str, shown_tokens: int, num_tokens: int, per_event: int
) -> None:
    tokenizer, ids = alphabet_tokenizer()
    choice = ChoiceText(tokenizer, TextOptions(stops=stops, include_stop=include), None)
    total = run(choice, events(ids, FinishReason.LENGTH, per_event=per_event))
    assert total.pieces.content == text
    assert [token.token_id for token in total.tokens] == ids[:shown_tokens]
    assert choice.num_tokens == num_tokens
    assert total.finished
    assert total.stop_string == (None if text == A_TO_R else next(stop for stop in stops if stop in A_TO_R))
    for token in total.tokens:
        assert token.logprob == TokenLogprob(token.token_id, -0.5, 1)
        assert A_TO_R.startswith(token.text, token.text_offset)


def test_tokens_leave_with_the_last_character_of_their_text() -> None:
    tokenizer, ids = alphabet_tokenizer()
    choice = ChoiceText(tokenizer, TextOptions(stops=("HIJKX",)), None)
    deltas = [choice.push(event) for event in events(ids[:5], None)]
    assert [(delta.pieces.content, len(delta.tokens)) for delta in deltas] == [
        ("DEF", 1),
        ("G", 0),
        ("", 0),
        ("", 0),
        ("HIJKLM", 4),
    ]
    assert not any(delta.finished for delta in deltas)


def test_after_a_stop_string_nothing_counts() -> None:
    tokenizer, ids = alphabet_tokenizer()
    choice = ChoiceText(tokenizer, TextOptions(stops=("I",)), None)
    first = choice.push(TokenEvent(0, tuple(ids)))
    assert (first.pieces.content, first.stop_string, first.finished) == ("DEFGH", "I", True)
    assert choice.push(TokenEvent(0, (97,), finish_reason=FinishReason.STOP)) == ChoiceDelta()
    assert choice.num_tokens == 3


def test_multi_byte_offsets_point_to_the_character() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("aé" + PARTY + "b")
    total = run(ChoiceText(tokenizer, TextOptions(), None), events(ids, FinishReason.LENGTH))
    assert total.pieces.content == "aé" + PARTY + "b"
    assert b"".join(token.bytes for token in total.tokens) == total.pieces.content.encode()
    party = [token for token in total.tokens if token.text.startswith("bytes:")]
    assert len(party) == 3
    assert {token.text_offset for token in party} == {2}
    assert total.tokens[-1].text_offset == 3


def test_an_unfinished_character_comes_at_the_end_with_its_tokens() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(PARTY * 2)[:5]
    choice = ChoiceText(tokenizer, TextOptions(), None)
    deltas = [choice.push(event) for event in events(ids, FinishReason.LENGTH)]
    assert [delta.pieces.content for delta in deltas] == ["", "", PARTY, "", "\ufffd"]
    assert [len(delta.tokens) for delta in deltas] == [0, 0, 3, 0, 2]
    assert [token.text_offset for token in deltas[-1].tokens] == [1, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (TextOptions(), "hi"),
        (TextOptions(skip_special_tokens=False), "hi"),
        (TextOptions(include_stop=True), "hi"),
        (TextOptions(include_stop=True, skip_special_tokens=False), "hi<|eos|>"),
    ],
)
def test_the_stop_token_is_scored_but_no_text_unless_asked_for(options: TextOptions, text: str) -> None:
    choice = ChoiceText(byte_tokenizer(), options, None)
    total = run(choice, events([104, 105, EOS_ID], FinishReason.STOP))
    assert total.pieces.content == text
    assert [(token.text, token.text_offset) for token in total.tokens] == [("h", 0), ("i", 1), ("<|eos|>", 2)]
    assert (choice.num_tokens, total.stop_string) == (3, None)


def test_a_plain_stop_token_is_cut_too() -> None:
    total = run(ChoiceText(byte_tokenizer(), TextOptions(), None), events([104, 105], FinishReason.STOP))
    assert total.pieces.content == "h"
    assert len(total.tokens) == 2


def test_special_tokens_before_a_stop_string_keep_their_entries() -> None:
    choice = ChoiceText(byte_tokenizer(), TextOptions(stops=("b",)), None)
    total = run(choice, events([97, CALL_ID, 98, 99], FinishReason.LENGTH))
    assert total.pieces.content == "a"
    assert [token.token_id for token in total.tokens] == [97, CALL_ID]


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    tokenizer = byte_tokenizer()
    options = TextOptions(stops=("ab",), min_tokens=4)
    choice = ChoiceText(tokenizer, options, None)
    total = run(choice, events([*b"ababab"], FinishReason.LENGTH))
    assert (total.pieces.content, total.stop_string, choice.num_tokens) == ("abab", "ab", 6)
    choice = ChoiceText(tokenizer, TextOptions(stops=("ab",), min_tokens=3), None)
    assert run(choice, events([*b"ababab"], FinishReason.LENGTH)).pieces.content == "ab"


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.FAILED])
def test_every_finish_releases_what_was_held_back(reason: FinishReason) -> None:
    choice = ChoiceText(byte_tokenizer(), TextOptions(stops=("abc",)), None)
    assert choice.push(TokenEvent(0, (97, 98))) == ChoiceDelta()
    last = choice.push(TokenEvent(0, (), finish_reason=reason))
    assert (last.pieces.content, len(last.tokens), last.finished) == ("ab", 2, True)


# ---------------------------------------------------------------- routers


class Brackets(TextRouter):
    """(reasoning) content [tool]: brackets disappear; each closing bracket gives what it closed."""

    def __init__(self) -> None:
        self.mode = ""
        self.text = ""

    def push(self, text: str) -> TextPieces:
        pieces = TextPieces()
        for char in text:
            if char in "([":
                self.mode, self.text = char, ""
            elif char in ")]":
                closed, self.text, self.mode = self.text, "", ""
                call = ToolCallDelta(0, "c", "f", closed)
                pieces += TextPieces(reasoning=closed) if char == ")" else TextPieces(tool_calls=(call,))
            elif self.mode:
                self.text += char
            else:
                pieces += TextPieces(content=char)
        return pieces

    def flush(self) -> TextPieces:
        return TextPieces(content=self.mode + self.text)


def test_text_is_sorted_after_stop_strings() -> None:
    choice = ChoiceText(byte_tokenizer(), TextOptions(stops=("END",)), Brackets())
    total = run(choice, events([*b"(why)ab[1]cEND(x)"], FinishReason.LENGTH))
    assert total.pieces == TextPieces("abc", "why", (ToolCallDelta(0, "c", "f", "1"),))
    assert "".join(token.text for token in total.tokens) == "(why)ab[1]c"
    assert choice.num_reasoning_tokens == len("(why)")


def test_what_the_router_held_is_released_after_everything_else() -> None:
    choice = ChoiceText(byte_tokenizer(), TextOptions(stops=("xyz",)), Brackets())
    total = run(choice, events([*b"a[1xy", 0xC3], FinishReason.LENGTH))
    assert total.pieces.content == "a[1xy\ufffd"
    assert choice.num_reasoning_tokens == 0


# ---------------------------------------------------------------- echo


def test_an_echoed_prompt_and_its_offsets() -> None:
    tokenizer = byte_tokenizer([b"ell"])
    ids = [BOS_ID, ord("h"), FIRST_WORD_ID, 0xC3, 0xA9, ord("!")]
    text, pieces = prompt_pieces(tokenizer, ids, [None] * 6, TextOptions())
    assert text == "hellé!"
    assert [piece.text_offset for piece in pieces] == [0, 0, 1, 4, 4, 5]
    text, pieces = prompt_pieces(tokenizer, ids, [None] * 6, TextOptions(skip_special_tokens=False))
    assert text == "<|bos|>hellé!"
    assert [piece.text_offset for piece in pieces] == [0, 7, 8, 11, 11, 12]


def test_an_echoed_sentencepiece_prompt_has_no_space_that_encoding_added() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata())
    ids = tokenizer.encode("hello hello")
    text, pieces = prompt_pieces(tokenizer, ids, [None] * len(ids), TextOptions())
    assert text == "hello hello"
    assert [(piece.text, piece.text_offset) for piece in pieces] == [("<s>", 0), (" hello", 0), (" hello", 5)]
