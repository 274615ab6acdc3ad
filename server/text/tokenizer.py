"""Text to token ids and back, exactly: one class over `tokenizers`, whichever file the vocabulary came from.

Knows bytes: where the vocabulary spells text byte by byte, decoding is exact and independent of how a sequence is cut.
Knows nothing of chat messages or streams. Immutable after construction and safe to use from several threads; encoding
releases the interpreter lock, so long texts belong on a worker thread.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Core

from engine.errors import LoadError
from server.text.gguf_tokenizer import build_gguf_tokenizer
from server.text.vocabulary import byte_vocabulary, spellings


class TextError(ValueError):
    """A text that no tokenizer can take; the message says why."""


class Tokenizer:
    """A vocabulary with everything needed to read and write it.

    Attributes:
        hf: the `tokenizers.Tokenizer` underneath (no truncation, no padding).
        vocab_size: one above the highest token id. A model's logits may be wider; the ids beyond are empty.
        special_tokens: the names chat templates use (`bos_token`, ...) -> the token's text.
        special_ids: control tokens, which `skip_special_tokens` leaves out of a text.
        added_ids: all tokens that are found whole in a text, control tokens included.
        chat_templates: by name; the plain one is `default`.
        is_bytewise: whether a sequence's text is the joined bytes of its tokens.
    """

    def __init__(self, core: Core, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> None:
        core.no_truncation()
        core.no_padding()
        self.hf = core
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        added = core.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        spelled = spellings(core)
        self.vocab_size = len(spelled)
        vocabulary = byte_vocabulary(core, spelled)
        self.is_bytewise = vocabulary is not None
        self._num_leading_spaces = vocabulary.num_leading_spaces if vocabulary else 0
        self._table = vocabulary.table if vocabulary else self._lone_texts()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer that a GGUF file's metadata describes. Raises LoadError."""
        built = build_gguf_tokenizer(metadata)
        return cls(built.core, built.special_tokens, built.chat_templates)

    @classmethod
    def from_pretrained(cls, path_or_id: str) -> "Tokenizer":
        """The fast tokenizer of a local folder or a hub id, as transformers configures it. Raises LoadError."""
        from transformers import AutoTokenizer  # a second of imports that a GGUF file does not need

        try:
            loaded = AutoTokenizer.from_pretrained(path_or_id)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise LoadError(f"no tokenizer could be loaded from {path_or_id}: {error}") from error
        core = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(core, Core):
            raise LoadError(f"the tokenizer of {path_or_id} ({type(loaded).__name__}) has no fast version")
        template = getattr(loaded, "chat_template", None)
        templates = template if isinstance(template, dict) else {"default": template} if template else {}
        return cls(core, loaded.special_tokens_map, templates)

    def _lone_texts(self) -> list[bytes]:
        """`[vocab_size]` what each token reads as when it stands alone; the best there is without byte spelling."""
        ids = range(self.vocab_size)
        return [text.encode() for text in self.hf.decode_batch([[i] for i in ids], skip_special_tokens=False)]

    @property
    def bos_token_id(self) -> int | None:
        """The token a text begins with, if the vocabulary has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the vocabulary has one."""
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.hf.token_to_id(text)

    @property
    def chat_template(self) -> str | None:
        """The plain chat template's source, if there is one."""
        return self.select_chat_template()

    def select_chat_template(self, name: str | None = None, *, has_tools: bool = False) -> str | None:
        """The source called `name`; without one, `tool_use` where it exists and tools are given, or the plain one."""
        if name is not None:
            return self.chat_templates.get(name)
        if has_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        return self.chat_templates.get("default")

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over everything that decides which ids a text becomes: equal fingerprints encode alike."""
        digest = hashlib.sha256(self.hf.to_str().encode())
        for name, text in sorted(self.special_tokens.items()):
            digest.update(f"\0{name}\0{text}".encode())
        return digest.hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; control tokens written out in it count as such. Raises TextError (see `encode_batch`)."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, `add_special_tokens` wrapping them as the model was trained (often: BOS in front).

        Raises:
            TextError: a text holds half a surrogate pair, so it is no Unicode text.
        """
        for text in texts:
            _check_text(text)
        # The batch call: the single one holds the interpreter lock and computes offsets nobody reads.
        encodings = self.hf.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_rendered(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`, for a text that may already begin with BOS (a rendered chat): BOS is never doubled."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        doubled = add_special_tokens and self._adds_bos and len(ids) > 1 and ids[1] == ids[0]
        return ids[1:] if doubled else ids

    @cached_property
    def _adds_bos(self) -> bool:
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The whole text of a sequence. Bytes that are no UTF-8 become U+FFFD; unknown ids are empty.

        `spaces_between_special_tokens=False` removes the space that some decoders (WordPiece) put between neighbouring
        added tokens; a vocabulary that spells bytes never has one there.
        """
        ids = [i for i in token_ids if 0 <= i < self.vocab_size]
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        if self.is_bytewise:
            text = b"".join([self._table[i] for i in ids]).decode("utf-8", errors="replace")
            return self._without_leading_spaces(text)
        runs = [ids] if spaces_between_special_tokens else self._runs(ids)
        return "".join(self.hf.decode(run, skip_special_tokens=False) for run in runs)

    def _without_leading_spaces(self, text: str) -> str:
        num = 0
        while num < self._num_leading_spaces and text.startswith(" ", num):
            num += 1
        return text[num:]

    def _runs(self, ids: list[int]) -> list[list[int]]:
        """`ids` cut wherever two added tokens meet."""
        runs: list[list[int]] = []
        for index, token_id in enumerate(ids):
            if index == 0 or (token_id in self.added_ids and ids[index - 1] in self.added_ids):
                runs.append([])
            runs[-1].append(token_id)
        return runs

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; empty for an id without a token."""
        return self._table[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        r"""A token's text, as logprobs show it. Part of a character is written `bytes:\xNN\xNN`: no two look alike."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_id(self, text: str) -> int | None:
        """The one token whose text is exactly `text`, or None."""
        found = self.hf.token_to_id(text)
        if found is not None and self.token_bytes(found) == text.encode():
            return found
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and self.token_bytes(ids[0]) == text.encode() else None


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise TextError(f"the text holds half a surrogate pair (U+{code:04X} at character {error.start})") from error
