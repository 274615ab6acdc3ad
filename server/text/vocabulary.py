"""Which bytes each token stands for, read off a tokenizer's decoder.

Byte-level vocabularies (GPT-2's alphabet) and SentencePiece ones (spaces as U+2581, `<0xNN>` byte tokens) spell text
byte by byte: there, the text of a sequence is the joined bytes of its tokens. Other decoders (WordPiece, suffixes) look
at neighbours; for those there is no such table.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Core

_SENTENCEPIECE_STAGES = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


@dataclass(frozen=True, slots=True)
class ByteVocabulary:
    """Bytes by token id.

    Attributes:
        table: `[vocab_size]`; empty where an id has no token.
        num_leading_spaces: how many spaces at the start of a whole text were put there by encoding, and come off again.
    """

    table: list[bytes]
    num_leading_spaces: int


def gpt2_alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level BPE spells bytes (Radford et al. 2019).

    Printable Latin-1 characters stand for themselves; the other 68 bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def spellings(core: Core) -> list[str | None]:
    """`[vocab_size]`: how the vocabulary writes each token; None where an id has none."""
    vocab = core.get_vocab(with_added_tokens=True)
    found: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for text, token_id in vocab.items():
        found[token_id] = text
    return found


def byte_vocabulary(core: Core, spelled: Sequence[str | None]) -> ByteVocabulary | None:
    """The table of `core`, whose tokens are `spelled` so; None when its decoder does not work byte by byte."""
    stages = list(_stages(core))
    kinds = {stage["type"] for stage in stages}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return ByteVocabulary(_byte_level_table(core, spelled), 0)
    if kinds & {"Replace", "Metaspace", "ByteFallback"} and kinds <= _SENTENCEPIECE_STAGES:
        return _sentencepiece(spelled, stages)
    return None


def _stages(core: Core) -> Iterator[dict[str, Any]]:
    """The decoder's stages, nested sequences unfolded."""
    if core.decoder is None:
        return
    waiting = [json.loads(core.decoder.__getstate__())]
    while waiting:
        stage = waiting.pop(0)
        if stage["type"] == "Sequence":
            waiting = stage["decoders"] + waiting
        else:
            yield stage


def _byte_level_table(core: Core, spelled: Sequence[str | None]) -> list[bytes]:
    alphabet = {ord(character): byte for character, byte in gpt2_alphabet().items()}
    added = core.get_added_tokens_decoder()
    table = []
    for token_id, text in enumerate(spelled):
        if text is None:
            table.append(b"")
        elif token_id in added:  # written in plain text, also where its characters are in the alphabet
            table.append(text.encode())
        else:
            table.append(_spelled_bytes(text, alphabet))
    return table


def _spelled_bytes(text: str, alphabet: Mapping[int, int]) -> bytes:
    """The bytes that `text` spells; its own UTF-8 when it uses a character outside the alphabet."""
    try:
        return codecs.charmap_encode(text, "strict", alphabet)[0]
    except UnicodeEncodeError:
        return text.encode()


def _sentencepiece(spelled: Sequence[str | None], stages: list[dict[str, Any]]) -> ByteVocabulary | None:
    replaced: list[tuple[str, str]] = []
    num_leading = 0
    for stage in stages:
        if stage["type"] == "Metaspace":
            replaced.append((stage["replacement"], " "))
            num_leading = int(stage.get("prepend_scheme", "always") != "never")
        elif stage["type"] == "Replace":
            if "String" not in stage["pattern"]:
                return None
            replaced.append((stage["pattern"]["String"], stage["content"]))
        elif stage["type"] == "Strip":
            if stage["content"] != " " or stage["stop"]:
                return None
            num_leading = stage["start"]
    byte_fallback = any(stage["type"] == "ByteFallback" for stage in stages)
    table = [_sentencepiece_bytes(text, replaced, byte_fallback) for text in spelled]
    return ByteVocabulary(table, num_leading)


def _sentencepiece_bytes(text: str | None, replaced: list[tuple[str, str]], byte_fallback: bool) -> bytes:
    if text is None:
        return b""
    if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode()
    for old, new in replaced:
        text = text.replace(old, new)
    return text.encode()
