"""A model of a known shape with random weights: as much work as the real one, without its download.

The tokenizer is the embedded model's, its vocabulary filled up with invented words to the shape's size, so that every
token a random model says has a text. Weights are scaled by their fan-in, so that values neither vanish nor overflow.
"""

import itertools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from engine.weights.gguf_header import read_gguf_header
from server.text.gguf_tokenizer import build_gguf_tokenizer

SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen2 model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position_embeddings: int = 32768

    @property
    def head_dim(self) -> int:
        """Of every head."""
        return self.hidden_size // self.num_heads

    def config(self) -> dict[str, Any]:
        """As `config.json` says it."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            for name, width in (("q", hidden), ("k", kv), ("v", kv)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (width, hidden)
                yield f"{prefix}.self_attn.{name}_proj.bias", (width,)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
            yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)


QWEN_05B = Shape(896, 4864, 24, 14, 2, 151_936)
"""Qwen2.5-0.5B."""


def write_random_model(shape: Shape, tokenizer_source: Path, folder: Path) -> None:
    """Write config, weights in bfloat16 and a tokenizer made from that of the GGUF file `tokenizer_source`."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, size in tqdm(list(shape.tensors()), desc="random weights", unit="tensor"):
        tensors[name] = _random(name, size, generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    metadata = read_gguf_header(tokenizer_source).metadata
    write_tokenizer(metadata, extended_tokens(metadata, shape.vocab_size), folder)


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.full(size, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16)
    # Small embeddings: a tied head would otherwise answer every token with itself.
    scale = 0.02 if "embed" in name else size[1] ** -0.5
    return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16)


def extended_tokens(metadata: dict[str, Any] | Any, vocab_size: int) -> list[str]:
    """The vocabulary of a GGUF file, then invented words in its spelling until there are `vocab_size` tokens."""
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    known = set(tokens)
    invented = ("Ġx" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    fresh = (word for word in invented if word not in known)
    return tokens + list(itertools.islice(fresh, vocab_size - len(tokens)))


def write_tokenizer(metadata: dict[str, Any] | Any, tokens: list[str], folder: Path) -> None:
    """A GGUF file's tokenizer with these tokens, as `tokenizer.json` and `tokenizer_config.json`."""
    built = build_gguf_tokenizer(metadata)
    content = json.loads(built.core.to_str())
    vocabulary = content["model"]["vocab"]
    for token_id in range(len(metadata["tokenizer.ggml.tokens"]), len(tokens)):
        vocabulary[tokens[token_id]] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **built.special_tokens}
    if "default" in built.chat_templates:
        settings["chat_template"] = built.chat_templates["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=2))
