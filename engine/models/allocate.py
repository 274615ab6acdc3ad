"""Empty decoders: every parameter allocated once, fused as the forward pass wants it, with a place for each tensor.

Knows the canonical tensor names and how they are stacked; knows nothing of where the values come from, and leaves to
`Parameters` how a matrix is stored.
"""

from dataclasses import dataclass

import torch

from engine.models.decoder import Decoder
from engine.models.layers import Attention, DecoderLayer, GatedMLP, RMSNorm
from engine.models.parameters import Parameters
from engine.models.rope import rotary_embedding
from engine.models.spec import DecoderSpec


def empty_decoder(spec: DecoderSpec, parameters: Parameters, max_model_len: int) -> Decoder:
    """A decoder with uninitialised weights; the places to fill are in `parameters.places` afterwards."""
    shape = _Shape(spec, parameters)
    embedding, tied_head = parameters.embedding("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(shape.layer(f"model.layers.{index}") for index in range(spec.num_layers))
    norm = shape.norm("model.norm", spec.hidden_size)
    head = tied_head if spec.tie_word_embeddings else parameters.head("lm_head", spec.vocab_size, spec.hidden_size)
    return Decoder(
        spec=spec,
        dtype=parameters.dtype,
        device=parameters.device,
        weight_bytes=parameters.nbytes,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        rope=rotary_embedding(spec.rope, spec.head_dim, max_model_len, _real(parameters.device)),
    )


def _real(device: torch.device) -> torch.device:
    """Where small tables go: a decoder on `meta` is only counted, but its tables are made from numbers."""
    return torch.device("cpu") if device.type == "meta" else device


@dataclass(frozen=True)
class _Shape:
    """What a specification says about the shapes of a layer's parameters."""

    spec: DecoderSpec
    parameters: Parameters

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.parameters.vector(f"{name}.weight", size), self.spec.rms_norm_eps)

    def layer(self, name: str) -> DecoderLayer:
        size = self.spec.hidden_size
        return DecoderLayer(
            input_norm=self.norm(f"{name}.input_layernorm", size),
            attention=self._attention(f"{name}.self_attn"),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm", size),
            mlp=self._mlp(f"{name}.mlp"),
        )

    def _attention(self, name: str) -> Attention:
        spec, linear = self.spec, self.parameters.linear
        outputs = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        return Attention(
            qkv=linear(name, outputs, spec.hidden_size, spec.qkv_bias),
            output=linear(name, {"o_proj": spec.hidden_size}, spec.query_size, spec.output_bias),
            q_norm=self.norm(f"{name}.q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.norm(f"{name}.k_norm", spec.head_dim) if spec.qk_norm else None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )

    def _mlp(self, name: str) -> GatedMLP:
        spec, linear = self.spec, self.parameters.linear
        outputs = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        return GatedMLP(
            gate_up=linear(name, outputs, spec.hidden_size, spec.mlp_bias),
            down=linear(name, {"down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias),
        )
