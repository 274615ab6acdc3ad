"""SmolLM2-135M-Instruct from its GGUF file against transformers' own reading of it: weights, logits, greedy tokens."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.config import no_progress
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, read_generation_config, read_spec
from engine.weights.checkpoint import resolve_model
from tests.fakes.naive_attention import naive_greedy, naive_logits

pytestmark = pytest.mark.slow

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def load(quantization: str) -> Decoder:
    return load_decoder(resolve_model(None), torch.float32, torch.device("cpu"), no_progress, None, quantization)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load("auto")


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """transformers' model with the weights as transformers itself dequantizes and reorders them."""
    path = str(resolve_model(None).path)
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30))
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)
    model = LlamaForCausalLM(LlamaConfig(**loaded["config"])).eval()
    missing = model.load_state_dict(loaded["tensors"], strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def test_specification() -> None:
    spec = read_spec(resolve_model(None))
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.vocab_size, spec.max_context, spec.rope.theta) == (49152, 8192, 100_000.0)
    assert spec.tie_word_embeddings
    assert read_generation_config(resolve_model(None)) == {"eos_token_id": [2]}


@pytest.mark.parametrize(("quantization", "lost"), [("none", 1e-3), ("auto", 0.02)])
def test_logits_equal_transformers(quantization: str, lost: float, reference: LlamaForCausalLM) -> None:
    """Widened weights in float32; kept as they are, products round their inputs to 16 bits. Logits deviate by 6."""
    token_ids = PROMPT + [(37 * index * index) % 49152 for index in range(100)]
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(naive_logits(load(quantization), token_ids), expected, atol=lost, rtol=0)


def test_64_greedy_tokens_equal_transformers_without_any_cache(decoder: Decoder, reference: LlamaForCausalLM) -> None:
    output = reference.generate(torch.tensor([PROMPT]), max_new_tokens=64, do_sample=False, pad_token_id=2)
    expected = output[0, len(PROMPT) :].tolist()
    assert naive_greedy(decoder, PROMPT, 64) == expected
