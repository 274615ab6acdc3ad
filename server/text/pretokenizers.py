"""How byte-level vocabularies cut text into words before merging, by the name a GGUF file gives (`tokenizer.ggml.pre`).

Knows the regular expressions that the models' own tokenizers were trained with. Merges never cross a word's end, so a
wrong entry does not fail: it quietly feeds the model other tokens than it has learnt. An unknown name is an error.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from engine.errors import LoadError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_1 = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_CASED_2 = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_TEKKEN = _CASED_1 + "|" + _CASED_2 + r"|\p{N}" + _TAIL_SLASH
_GPT4O = _CASED_1 + _CONTRACTIONS + "?|" + _CASED_2 + _CONTRACTIONS + r"?|\p{N}{1,3}" + _TAIL_SLASH
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text into words.

    Attributes:
        splits: regular expressions applied one after another, each to the pieces that the one before left; matches
            and what lies between them become pieces.
        ignore_merges: a word that is itself in the vocabulary is one token, whatever the merges would make of it.
        add_bos: whether a prompt begins with BOS where the file does not say.
        nfc: text is first brought to Unicode normal form C.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer, its last stage spelling each word's bytes in the GPT-2 alphabet."""
        stages = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        return pre_tokenizers.Sequence([*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to text before it is cut; None for nothing."""
        return normalizers.NFC() if self.nfc else None


_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_TIKTOKEN = PreTokenizer((_LLAMA3,))
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
_O200K = PreTokenizer((_GPT4O,))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "a.x-4.0"), _PLAIN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _TIKTOKEN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""`tokenizer.ggml.pre` -> how to cut. `default` is also what files older than the key get."""


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The entry called `name`.

    Raises:
        LoadError: nobody told us how that vocabulary cuts text.
    """
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise LoadError(f"tokenizer.ggml.pre names the unknown pre-tokenizer {name!r}; known: {known}")
    return found
