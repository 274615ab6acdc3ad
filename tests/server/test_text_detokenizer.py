import pytest

from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer
from tests.fakes.byte_tokenizer import CALL_ID, EOS_ID, FIRST_WORD_ID, byte_tokenizer
from tests.fakes.smollm2 import smollm2_tokenizer
from tests.server.test_text_tokenizer import spm_metadata, wordpiece_tokenizer

PARTY = "\U0001f389"


def deltas(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_a_character_in_three_tokens_comes_whole() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(PARTY * 2)
    assert deltas(tokenizer, ids) == ["", "", PARTY, "", "", PARTY, ""]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_an_unfinished_character_ends_as_one_replacement(num_tokens: int) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(PARTY * 4)[: 9 + num_tokens]
    assert "".join(deltas(tokenizer, ids)) == PARTY * 3 + "\ufffd" == tokenizer.decode(ids)


def test_spaces_survive_at_the_beginning() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(" 9, 10")
    assert "".join(deltas(tokenizer, ids)) == " 9, 10"
    assert deltas(tokenizer, ids)[0] == " "


def test_bytes_that_are_no_utf8_are_replaced_as_soon_as_that_is_certain() -> None:
    tokenizer = byte_tokenizer()
    assert deltas(tokenizer, [0xFF, 97, 0xF0, 0x9F, 98, 0xE2]) == ["\ufffd", "a", "", "", "\ufffdb", "", "\ufffd"]


def test_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    ids = [97, CALL_ID, EOS_ID, 98]
    assert deltas(tokenizer, ids) == ["a", "", "", "b", ""]
    assert deltas(tokenizer, ids, skip_special_tokens=False) == ["a", "<|call|>", "<|eos|>", "b", ""]


def test_ids_without_a_token_are_silent() -> None:
    assert deltas(byte_tokenizer(), [97, 10**6, 98]) == ["a", "", "b", ""]


def test_where_a_token_would_begin() -> None:
    tokenizer = byte_tokenizer([b"\x89b", b"\xf0\x9f"])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.start_of(97) == 0
    detokenizer.push(97)
    assert (detokenizer.start_of(FIRST_WORD_ID + 1), detokenizer.num_pending) == (1, 0)
    detokenizer.push(FIRST_WORD_ID + 1)
    assert detokenizer.num_pending == 1
    assert detokenizer.start_of(0x8E) == 1  # goes on with the character
    assert detokenizer.start_of(97) == 2  # breaks it: a replacement character comes first
    assert detokenizer.start_of(EOS_ID) == 1  # adds nothing
    assert detokenizer.push(0x8E) + detokenizer.push(FIRST_WORD_ID) == PARTY + "b"
    assert (detokenizer.num_chars, detokenizer.num_pending) == (3, 0)


def test_sentencepiece_goes_on_after_a_prompt() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata())
    ids = tokenizer.encode("hello hello", add_special_tokens=False)
    assert deltas(tokenizer, ids) == [" hello", " hello", ""]
    party = tokenizer.encode(PARTY, add_special_tokens=False)
    assert deltas(tokenizer, party)[-2:] == [PARTY, ""]


def test_wordpiece_by_window() -> None:
    tokenizer = wordpiece_tokenizer()
    assert deltas(tokenizer, [3, 4, 6, 7, 3, 5]) == ["play", "ing", " chess", ",", " play", "s", ""]
    ids = [1, 2, 3, 4, 2, 1]
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=False)) == "[CLS] [SEP] playing [SEP] [CLS]"
    close = deltas(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(close) == "[CLS][SEP] playing [SEP][CLS]"
    assert "".join(close) == tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(deltas(tokenizer, ids)) == "playing"
