"""Token ids to text as they come, without ever showing half a character.

Where the vocabulary spells bytes, the bytes go through an incremental UTF-8 decoder: what it gives joins to the same
text however the tokens are cut, and U+FFFD appears only for bytes that are certainly no UTF-8. Other vocabularies are
decoded in a short window of recent tokens, whose new end is given out.

The text is taken as a continuation: a first token's leading space is kept.
"""

import codecs

from server.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """One sequence's way from ids to text.

    Attributes:
        num_chars: characters given out so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self.num_chars = 0
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._spelling: _Bytes | _Window = (
            _Bytes(tokenizer) if tokenizer.is_bytewise else _Window(tokenizer, spaces_between_special_tokens)
        )

    def push(self, token_id: int) -> str:
        """Take one more token; give the text that is now certain."""
        return "" if token_id in self._skipped else self._given(self._spelling.push(token_id))

    def flush(self) -> str:
        """The sequence has ended: give the rest. An unfinished character is one U+FFFD (half a surrogate: two)."""
        return self._given(self._spelling.flush())

    def start_of(self, token_id: int) -> int:
        """The character where `token_id`'s text would begin if it came next.

        A token that goes on with an unfinished character begins where that character does.
        """
        first = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)[:1]
        return self.num_chars + self._spelling.num_before(first)

    @property
    def num_pending(self) -> int:
        """How many characters the tokens taken but not yet given out would make, were they the last."""
        return self._spelling.num_pending

    def _given(self, text: str) -> str:
        self.num_chars += len(text)
        return text


class _Bytes:
    """A vocabulary that spells bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def num_pending(self) -> int:
        return len(self._begun.decode("utf-8", errors="replace"))

    def num_before(self, first: bytes) -> int:
        """How many of the bytes begun are U+FFFD for certain when the byte `first` (or none) comes next."""
        begun = self._begun
        return max(0, len((begun + first).decode("utf-8", errors="replace")) - 1) if begun else 0

    @property
    def _begun(self) -> bytes:
        return self._decoder.getstate()[0]


class _Window:
    """Any other vocabulary: decode the last few tokens with and without the new ones; the difference is new text."""

    def __init__(self, tokenizer: Tokenizer, spaces_between_special_tokens: bool) -> None:
        self._core = tokenizer.hf
        self._vocab_size = tokenizer.vocab_size
        self._apart: frozenset[int] = frozenset() if spaces_between_special_tokens else tokenizer.added_ids
        self._ids: list[int] = []  # the window
        self._num_given = 0  # how many of its tokens have been given out

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < self._vocab_size:
            return ""
        if self._ids and token_id in self._apart and self._ids[-1] in self._apart:
            rest = self.flush()
            self._ids, self._num_given = [token_id], 0
            return rest + self._advance(final=False)
        self._ids.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    @property
    def num_pending(self) -> int:
        return int(self._num_given < len(self._ids))  # or more: enough to say that something is to come

    def num_before(self, first: bytes) -> int:
        return 0

    def _advance(self, *, final: bool) -> str:
        given = self._decode(self._ids[: self._num_given])
        text = self._decode(self._ids)
        decided = text.startswith(given) and not text.endswith(_REPLACEMENT)
        if not (decided or final):
            return ""
        self._ids, self._num_given = self._ids[self._num_given :], len(self._ids) - self._num_given
        return text[len(given) :]

    def _decode(self, ids: list[int]) -> str:
        return self._core.decode(ids, skip_special_tokens=False) if ids else ""
