"""A real tokenizer without a file: token `b` is the byte `b`, then a few control tokens, then a test's own words."""

from collections.abc import Sequence

from server.text.tokenizer import Tokenizer
from server.text.vocabulary import gpt2_alphabet

BOS_ID = 256
EOS_ID = 257
CALL_ID = 258
FIRST_WORD_ID = 259
SPECIAL_TEXTS = ("<|bos|>", "<|eos|>", "<|call|>")


def byte_tokenizer(
    words: Sequence[bytes] = (), *, add_bos: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """Word `i` has the id `FIRST_WORD_ID + i`; encoding never makes words (no merges), decoding reads them."""
    spelling = {byte: char for char, byte in gpt2_alphabet().items()}
    tokens = [spelling[byte] for byte in range(256)]
    tokens += SPECIAL_TEXTS
    tokens += ["".join(spelling[byte] for byte in word) for word in words]
    assert len(set(tokens)) == len(tokens), "a word is already a token"
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL_TEXTS) + [1] * len(words),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": add_bos,
    }
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    return Tokenizer.from_gguf(metadata)
