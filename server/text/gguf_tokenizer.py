"""A `tokenizers.Tokenizer` out of a GGUF file's metadata: the vocabulary, its merges or scores, its special tokens.

Knows GGUF's key names and the two kinds of vocabulary that text models use there: `gpt2` (byte-level BPE) and `llama`
(SentencePiece BPE with scores and byte fallback). Knows nothing of files: it is given the metadata as a mapping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Core

from engine.errors import LoadError
from server.text.pretokenizers import find_pre_tokenizer

_PREFIX = "tokenizer.ggml."
_SPACE = "▁"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
}


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, one per token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What the metadata describes.

    Attributes:
        core: encodes and decodes.
        special_tokens: names as chat templates know them (`bos_token`, ...) -> the token's text.
        chat_templates: by name; the plain one is `default`.
    """

    core: Core
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises:
        LoadError: no vocabulary, a kind of vocabulary we don't have, or keys that contradict each other.
    """
    tokens = _strings(metadata, "tokens")
    kind = metadata.get(f"{_PREFIX}model")
    if kind == "gpt2":
        core, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        core, add_bos = _sentencepiece(metadata, tokens), True
    else:
        raise LoadError(f"tokenizer.ggml.model is {kind!r}; only 'gpt2' and 'llama' vocabularies are supported")
    named = _named_tokens(metadata, tokens)
    _add_marked_tokens(core, tokens, _token_types(metadata, len(tokens)), set(named.values()))
    core.post_processor = _wrapper(
        core,
        bos=named.get("bos_token") if metadata.get(f"{_PREFIX}add_bos_token", add_bos) else None,
        eos=named.get("eos_token") if metadata.get(f"{_PREFIX}add_eos_token", False) else None,
    )
    return GGUFTokenizer(core, named, _chat_templates(metadata))


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_PREFIX + key)
    if values is None or len(values) == 0:
        raise LoadError(f"the file holds no {_PREFIX}{key}: it carries no tokenizer")
    return [str(value) for value in values]


def _ids_by_text(tokens: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        ids.setdefault(text, token_id)
    return ids


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Core, bool]:
    """Byte-level BPE (Radford et al. 2019), and whether its prompts begin with BOS where the file does not say."""
    pre = find_pre_tokenizer(metadata.get(f"{_PREFIX}pre") or "default")
    merges = []
    for rule in metadata.get(f"{_PREFIX}merges", ()):
        left, space, right = rule[1:].partition(" ")  # a token may begin with a space, but none holds one later
        if not space:
            raise LoadError(f"tokenizer.ggml.merges holds {rule!r}, which is no pair")
        merges.append((rule[0] + left, right))
    core = Core(_bpe_model(_ids_by_text(tokens), merges, ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre.build()
    core.decoder = decoders.ByteLevel()
    return core, pre.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Core:
    """SentencePiece BPE (Kudo & Richardson 2018) with byte fallback; its merges are implied by the scores."""
    ids = _ids_by_text(tokens)
    scores = metadata.get(f"{_PREFIX}scores")
    if scores is None or len(scores) < len(tokens):
        raise LoadError("a 'llama' vocabulary needs one tokenizer.ggml.scores entry per token")
    unknown = metadata.get(f"{_PREFIX}unknown_token_id")
    unk_token = tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None
    core = Core(_bpe_model(ids, _implied_merges(ids, scores), unk_token=unk_token, byte_fallback=True))
    add_space = bool(metadata.get(f"{_PREFIX}add_space_prefix", True))
    stages: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if add_space else []
    core.normalizer = normalizers.Sequence([*stages, normalizers.Replace(" ", _SPACE)])
    undo: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if add_space else undo)
    return core


def _implied_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best first.

    SentencePiece joins, again and again, the neighbours whose union has the highest score; BPE joins those whose rule
    stands first. So rules sorted by the score of what they make (ties: the older token) do the same.
    """
    found: list[tuple[float, int, str, str]] = []
    for text, token_id in ids.items():
        score = -float(scores[token_id])
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                found.append((score, token_id, left, right))
    found.sort(key=lambda rule: (rule[0], rule[1], ids[rule[2]], ids[rule[3]]))
    return [(left, right) for _, _, left, right in found]


def _bpe_model(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            unknown = next(part for part in (left, right, left + right) if part not in ids)
            raise LoadError(f"a merge rule names the token {unknown!r}, which is not in the vocabulary")
    return models.BPE(
        vocab=ids,
        merges=merges,
        unk_token=unk_token,
        fuse_unk=unk_token is not None,
        byte_fallback=byte_fallback,
        ignore_merges=ignore_merges,
    )


def _token_types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    types = metadata.get(f"{_PREFIX}token_type")
    if types is None:
        return [_TokenType.NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise LoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} tokens")
    return [int(kind) for kind in types]


def _named_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    named = {}
    for name, key in _NAMED.items():
        token_id = metadata.get(_PREFIX + key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise LoadError(f"{_PREFIX}{key} is {token_id}, outside the vocabulary of {len(tokens)} tokens")
        named[name] = tokens[token_id]
    return named


def _add_marked_tokens(core: Core, tokens: Sequence[str], types: Sequence[int], named: set[str]) -> None:
    """Tokens found whole in text: control tokens (special) and user-defined ones (plain text, but never cut)."""
    special, plain = [], []
    for text, kind in zip(tokens, types, strict=True):
        if not text:
            continue
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN) or (text in named and kind != _TokenType.USER_DEFINED):
            special.append(AddedToken(text, normalized=False, special=True))
        elif kind == _TokenType.USER_DEFINED:
            plain.append(AddedToken(text, normalized=False, special=False))
    core.add_special_tokens(special)
    core.add_tokens(plain)


def _wrapper(core: Core, *, bos: str | None, eos: str | None) -> processors.PostProcessor | None:
    """What puts BOS before and EOS after a text, when asked to add special tokens."""
    parts = {name: text for name, text in (("BOS", bos), ("EOS", eos)) if text is not None}
    if not parts:
        return None
    layout = [name for name in ("BOS", "$A", "EOS") if name == "$A" or name in parts]
    specials = [{"id": name, "ids": [core.token_to_id(text)], "tokens": [text]} for name, text in parts.items()]
    return processors.TemplateProcessing(single=layout, special_tokens=specials)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {"default": metadata[key]} if metadata.get(key) else {}
    for name in metadata.get("tokenizer.chat_templates", ()):
        source = metadata.get(f"{key}.{name}")
        if source:
            templates[str(name)] = source
    return templates
