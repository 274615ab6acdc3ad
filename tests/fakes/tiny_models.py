"""Tiny random models of every family, written to a folder as their publishers would: config, safetensors, tokenizer.

Weights are wide enough, biases and norms random enough, that a wrong rotation, bias or norm shows in the logits.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FAMILIES = ("llama", "smollm2", "mistral", "qwen2", "qwen3")

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 16, "head_dim": 24},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


def make_tiny_model(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny random model of `family` (see `FAMILIES`) and its tokenizer into `folder`; returns the folder.

    `overrides` are fields of `config.json`, such as `num_hidden_layers=3` or `rope_parameters={...}`.
    """
    tokenizer = tiny_tokenizer()
    settings = {
        **_COMMON,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.convert_tokens_to_ids(IM_START),
        "eos_token_id": tokenizer.convert_tokens_to_ids(IM_END),
        **_OWN[family],
        **overrides,
    }
    config = AutoConfig.for_model(**settings)
    model = random_model(config, seed).to(dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=[config.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        do_sample=True,
        temperature=0.7,
        top_k=20,
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def random_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A transformers model with every parameter random, biases and norms included."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(noise * 0.2 + ("norm" in name))
    return model


def load_reference(folder: Path) -> PreTrainedModel:
    """The model of `folder` as transformers runs it, in float32 with plain attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 288 tokens: three special ones, every byte, and some merges of English."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(["the user and the assistant said that there is nothing other than this"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=IM_START, eos_token=IM_END, unk_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
