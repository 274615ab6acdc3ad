import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from engine.errors import LoadError
from server.text.pretokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from server.text.tokenizer import TextError, Tokenizer
from tests.fakes.byte_tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID, byte_tokenizer
from tests.fakes.smollm2 import smollm2_metadata, smollm2_tokenizer

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
PARTY = "\U0001f389"
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # SmolLM2 was trained without them; they are dropped


# ---------------------------------------------------------------- the embedded model


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [("1, 2, 3, 4, 5, 6, 7, 8,", 23), ("Here is the English alphabet: ABC", 7), (PARTY * 8, 24)],
)
def test_smollm2_counts(text: str, num_tokens: int) -> None:
    assert len(smollm2_tokenizer().encode(text)) == num_tokens


def test_smollm2_digits_are_tokens_of_their_own() -> None:
    assert smollm2_tokenizer().encode("0123456789") == list(range(32, 42))


def test_smollm2_special_tokens() -> None:
    tokenizer = smollm2_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_ids == frozenset(range(17))
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False).startswith("<|im_s")
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template


@given(TEXTS.filter(lambda text: not MISSING_BYTES & set(text.encode())))
@settings(deadline=None)
def test_decode_undoes_encode(text: str) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.hf.decode(ids, skip_special_tokens=False) == text


@given(TEXTS)
@settings(deadline=None)
def test_smollm_pre_tokenizer_cuts_as_the_models_own_does(text: str) -> None:
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert find_pre_tokenizer("smollm").build().pre_tokenize_str(text) == own.pre_tokenize_str(text)


@given(TEXTS)
@settings(deadline=None)
def test_gpt2_pre_tokenizer_cuts_as_byte_level_does(text: str) -> None:
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert find_pre_tokenizer("gpt-2").build().pre_tokenize_str(text) == own.pre_tokenize_str(text)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_no_text(name: str) -> None:
    text = "It's 12345 o'CLOCK, HelloWorld!  \n\n\t x=1;\r\n 中文カナ한글 ça va?  \U0001f389 ½ "
    words = find_pre_tokenizer(name).build().pre_tokenize_str(text)
    assert words[0][1][0] == 0
    assert all(end == start for (_, (_, end)), (_, (start, _)) in pairwise(words))
    assert words[-1][1][1] == len(text)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "I'LL pay 1234567", ["I", "'LL", " pay", " ", "123", "456", "7"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
        ("gpt-2", "I'LL pay 1234", ["I", "'", "LL", " pay", " 1234"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-coder", "a b\n12", ["a", " b", "\n", "1", "2"]),
        ("deepseek-v3", "x1234中文", ["x", "123", "4", "中文"]),
    ],
)
def test_known_cuts(name: str, text: str, words: list[str]) -> None:
    cut = find_pre_tokenizer(name).build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_encoding_from_several_threads_gives_the_same_ids() -> None:
    tokenizer, text = smollm2_tokenizer(), "The quick brown fox. " * 2000
    want, found = tokenizer.encode(text), []
    threads = [threading.Thread(target=lambda: found.append(tokenizer.encode(text))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want] * 4
    assert tokenizer.encode_batch([text, "a"]) == [want, tokenizer.encode("a")]


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="surrogate"):
        smollm2_tokenizer().encode(text)


def test_empty_text_has_no_tokens() -> None:
    assert smollm2_tokenizer().encode("") == []
    assert smollm2_tokenizer().decode([]) == ""


# ---------------------------------------------------------------- tokens


def test_token_text_is_lossless_for_parts_of_characters() -> None:
    tokenizer = byte_tokenizer([b"\xf0\x9f", b"\x9f\x98", " né".encode()])
    assert tokenizer.token_text(FIRST_WORD_ID) == "bytes:\\xf0\\x9f"
    assert tokenizer.token_text(FIRST_WORD_ID + 1) == "bytes:\\x9f\\x98"
    assert tokenizer.token_text(FIRST_WORD_ID + 2) == " né"
    assert len({tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}) == tokenizer.vocab_size


def test_ids_beyond_the_vocabulary_are_empty() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([104, 10**6, 105]) == "hi"


def test_token_id_wants_the_exact_text() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_id("<|eos|>") == EOS_ID
    assert tokenizer.token_id("a") == 97
    assert tokenizer.token_id("é") is None
    assert tokenizer.token_id("Ġ") is None  # how the vocabulary spells a space, but not the text of a token
    assert tokenizer.token_id(" ") == 32


def test_decode_replaces_what_is_no_utf8() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode([0xFF, 97]) == "\ufffda"
    assert tokenizer.decode([0xF0, 0x9F, 0x8E]) == "\ufffd"


def test_an_added_token_is_read_as_it_is_written() -> None:
    metadata = dict(smollm2_metadata())
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<é｜>", "<plain>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 4]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("x<é｜><plain>")
    assert ids[1:] == [49152, 49153]
    assert tokenizer.token_bytes(49152) == "<é｜>".encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == "x<é｜><plain>"
    assert tokenizer.decode(ids) == "x<plain>"  # user-defined tokens are text


# ---------------------------------------------------------------- beginning of sequence


def test_bos_is_added_as_the_file_says_and_never_doubled() -> None:
    tokenizer = byte_tokenizer(add_bos=True)
    assert tokenizer.encode("a") == [BOS_ID, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.encode_rendered("a") == [BOS_ID, 97]
    assert tokenizer.encode_rendered("<|bos|>a") == [BOS_ID, 97]
    assert tokenizer.encode_rendered("<|bos|>a", add_special_tokens=False) == [BOS_ID, 97]
    assert tokenizer.encode_rendered("") == [BOS_ID]
    assert byte_tokenizer().encode_rendered("<|bos|><|bos|>a") == [BOS_ID, BOS_ID, 97]  # the text's own


def test_fingerprint_follows_everything_that_decides_the_ids() -> None:
    prints = {byte_tokenizer().fingerprint, byte_tokenizer([b"ab"]).fingerprint}
    prints |= {byte_tokenizer(add_bos=True).fingerprint}
    assert len(prints) == 3
    assert byte_tokenizer().fingerprint == byte_tokenizer(chat_template="x").fingerprint


# ---------------------------------------------------------------- SentencePiece in GGUF

SPM_PIECES = [
    "▁",
    "▁h",
    "▁he",
    "l",
    "ll",
    "llo",
    "lo",
    "▁hello",
    "h",
    "e",
    "o",
    "w",
    "r",
    "d",
    "▁w",
    "or",
    "ld",
    "orld",
]


def spm_metadata(*, add_space_prefix: bool = True) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    scores = [0.0] * 259 + [-float(index * 7 % 18) for index in range(len(SPM_PIECES))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def naive_sentencepiece(text: str, metadata: dict[str, object]) -> list[int]:
    """Again and again join the neighbours whose union scores best, leftmost first; then bytes for what is unknown."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list(("▁" + text if text else text).replace(" ", "▁"))
    while True:
        unions = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@given(st.text(alphabet="helowrd é\U0001f389", max_size=25))
@settings(deadline=None)
def test_sentencepiece_merges_by_score_with_byte_fallback(text: str) -> None:
    metadata = spm_metadata()
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == naive_sentencepiece(text, metadata)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [1, *ids]


def test_sentencepiece_details() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata())
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, hello)) == b" hello"
    assert tokenizer.decode([1, *hello]) == "hello"
    assert tokenizer.decode([1, *hello], skip_special_tokens=False) == "<s> hello"
    without = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False))
    assert without.decode(without.encode("ello")) == "ello"
    assert without.decode(without.encode(" hello")) == " hello"


# ---------------------------------------------------------------- files that are wrong


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "nobody-knows"}, "nobody-knows"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["qq"]}, "no pair"),
        ({"tokenizer.ggml.merges": ["absent token"]}, "absent"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ],
)
def test_a_broken_file_is_an_error_that_names_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Tokenizer.from_gguf({**smollm2_metadata(), **changes})


def test_named_chat_templates_of_a_file() -> None:
    metadata = {
        **smollm2_metadata(),
        "tokenizer.chat_templates": ["tool_use", "gone"],
        "tokenizer.chat_template.tool_use": "T",
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert set(tokenizer.chat_templates) == {"default", "tool_use"}
    assert tokenizer.select_chat_template(has_tools=True) == "T"
    assert tokenizer.select_chat_template() == tokenizer.chat_template == smollm2_metadata()["tokenizer.chat_template"]
    assert tokenizer.select_chat_template("gone") is None


# ---------------------------------------------------------------- folders


def save_folder(path, template) -> PreTrainedTokenizerFast:
    core = Core.from_str(byte_tokenizer([b"ab"], add_bos=True).hf.to_str())
    core.enable_truncation(4)
    core.enable_padding(length=9)
    loaded = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|bos|>", eos_token="<|eos|>")
    loaded.chat_template = template
    loaded.save_pretrained(path)
    return loaded


def test_a_folder_encodes_as_transformers_does_without_its_truncation(tmp_path) -> None:
    save_folder(tmp_path, "hello {{ bos_token }}")
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.encode("abcdefghijk") == [BOS_ID, *b"abcdefghijk"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert tokenizer.special_tokens["bos_token"] == "<|bos|>"
    assert tokenizer.chat_template == "hello {{ bos_token }}"
    assert EOS_ID in tokenizer.special_ids


def test_a_folder_with_several_chat_templates(tmp_path) -> None:
    save_folder(tmp_path, {"default": "D", "tool_use": "T", "rag": "R"})
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "T", "rag": "R"}
    assert tokenizer.select_chat_template(has_tools=True) == "T"
    assert tokenizer.select_chat_template("rag") == "R"


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path) -> None:
    with pytest.raises(LoadError, match="tokenizer"):
        Tokenizer.from_pretrained(str(tmp_path))


# ---------------------------------------------------------------- other decoders


def metaspace_core() -> Core:
    core = Core(models.Unigram([("<unk>", 0.0), ("▁he", -1.0), ("llo", -1.5), ("▁", -3.0), ("é", -4.0)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return core


def test_metaspace_is_read_byte_by_byte() -> None:
    tokenizer = Tokenizer(metaspace_core(), {}, {})
    assert tokenizer.is_bytewise
    ids = tokenizer.encode("hello hello")
    assert tokenizer.decode(ids) == tokenizer.hf.decode(ids) == "hello hello"


def wordpiece_tokenizer() -> Tokenizer:
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "play": 3, "##ing": 4, "##s": 5, "chess": 6, ",": 7}
    core = Core(models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens([AddedToken(text, special=True) for text in ("[UNK]", "[CLS]", "[SEP]")])
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return Tokenizer(core, {"cls_token": "[CLS]"}, {})


def test_wordpiece_text_and_spaces_between_special_tokens() -> None:
    tokenizer = wordpiece_tokenizer()
    assert not tokenizer.is_bytewise
    ids = tokenizer.encode("Playing chess, plays")
    assert tokenizer.decode(ids) == "playing chess, plays"
    together = [1, 2, 3, 4]
    assert tokenizer.decode(together, skip_special_tokens=False) == "[CLS] [SEP] playing"
    assert (
        tokenizer.decode(together, skip_special_tokens=False, spaces_between_special_tokens=False)
        == "[CLS][SEP] playing"
    )
    assert tokenizer.token_text(3) == "play"
