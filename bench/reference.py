"""transformers as the oracle: what a model's greedy answer is, and how close the second choice came.

    python -m bench.reference MODEL --num 16   prompts as JSON lists of ids on standard input, one JSON line each out

Runs in a process of its own, in float32 with plain attention, and ends before anything is timed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

NUM_TOP = 20


def load(path: Path) -> PreTrainedModel:
    """The model of a folder or a GGUF file, in float32."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    # `from_pretrained` would want one more package only to read this file; its parts do not.
    settings = load_gguf_checkpoint(str(path))["config"]
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)["tensors"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.float().eval()


def write_folder(source: Path, folder: Path) -> None:
    """A GGUF file's model as a folder of bfloat16 safetensors, tokenizer included."""
    from bench.random_model import write_tokenizer
    from engine.weights.gguf_header import read_gguf_header

    model = load(source).to(torch.bfloat16)
    metadata = read_gguf_header(source).metadata
    model.config.bos_token_id = metadata["tokenizer.ggml.bos_token_id"]
    model.config.eos_token_id = metadata["tokenizer.ggml.eos_token_id"]
    model.generation_config = type(model.generation_config)(eos_token_id=model.config.eos_token_id)
    model.save_pretrained(folder)
    write_tokenizer(metadata, list(metadata["tokenizer.ggml.tokens"]), folder)


def continuation(model: PreTrainedModel, prompt_ids: list[int], num: int) -> list[dict[str, Any]]:
    """The greedy answer: per token its id, the likeliest alternatives with their logits, and all logits' deviation."""
    model.generation_config.eos_token_id = None  # go on to the end, whatever is said
    ids = torch.tensor([prompt_ids])
    settings = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "pad_token_id": 0}
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num,
            output_logits=True,
            return_dict_in_generate=True,
            **settings,
        )
    return [_step(logits[0].float()) for logits in output.logits]


def _step(logits: torch.Tensor) -> dict[str, Any]:
    top = logits.topk(NUM_TOP)
    return {"top_ids": top.indices.tolist(), "top_logits": top.values.tolist(), "deviation": float(logits.std())}


def main() -> int:
    """Answer the prompts on standard input."""
    parser = argparse.ArgumentParser(prog="python -m bench.reference")
    parser.add_argument("model", type=Path)
    parser.add_argument("--num", type=int, default=16)
    args = parser.parse_args()
    prompts = json.load(sys.stdin)
    model = load(args.model)
    for prompt_ids in prompts:
        print(json.dumps(continuation(model, prompt_ids, args.num)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
