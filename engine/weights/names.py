"""GGUF tensor names to the names that safetensors checkpoints of the same families use.

Knows words only. The canonical names are those of the families' published safetensors.
"""

import re

from engine.errors import LoadError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def canonical_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        LoadError: a tensor that none of the known families has.
    """
    match = _PATTERN.fullmatch(gguf_name)
    if match is not None:
        layer, part, kind = match["layer"], match["part"], match["kind"]
        if layer is None and part in _TOP:
            return f"{_TOP[part]}.{kind}"
        if layer is not None and part in _LAYER:
            return f"model.layers.{int(layer)}.{_LAYER[part]}.{kind}"
    raise LoadError(f"unexpected tensor {gguf_name}")
