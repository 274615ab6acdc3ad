"""Empty decoders: every parameter allocated once, fused as the forward pass wants it, with a place for each tensor.

Knows the canonical tensor names and how they are stacked; knows nothing of where the values come from. On the `meta`
device nothing is allocated, which is how bytes are counted before any memory is taken.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.layers import Attention, DecoderLayer, GatedMLP, Linear, RMSNorm
from engine.models.rope import rotary_embedding
from engine.models.spec import DecoderSpec


def weight_bytes_of(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes that the weights of a model will take in `dtype`, without allocating them."""
    return empty_decoder(spec, dtype, torch.device("meta"), 1)[0].weight_bytes


def empty_decoder(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> tuple[Decoder, dict[str, Tensor]]:
    """A decoder with uninitialised weights, and the memory to fill: canonical tensor name -> view."""
    parameters = _Parameters(spec, dtype, device)
    embedding = parameters.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(parameters.layer(f"model.layers.{index}") for index in range(spec.num_layers))
    norm = parameters.norm("model.norm", spec.hidden_size)
    head = Linear(embedding)
    if not spec.tie_word_embeddings:
        head = Linear(parameters.tensor("lm_head.weight", spec.vocab_size, spec.hidden_size))
    decoder = Decoder(
        spec=spec,
        dtype=dtype,
        device=device,
        weight_bytes=sum(target.numel() for target in parameters.targets.values()) * dtype.itemsize,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        rope=rotary_embedding(spec.rope, spec.head_dim, max_model_len, device),
    )
    return decoder, parameters.targets


@dataclass
class _Parameters:
    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    targets: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.targets[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.targets[name]

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", size), self.spec.rms_norm_eps)

    def linear(self, name: str, num_outputs: dict[str, int], num_inputs: int, bias: bool) -> Linear:
        """One matrix for the projections `name.part`, their outputs one below the other."""
        weight = self._stacked(name, "weight", num_outputs, (num_inputs,))
        return Linear(weight, self._stacked(name, "bias", num_outputs, ()) if bias else None)

    def layer(self, name: str) -> DecoderLayer:
        size = self.spec.hidden_size
        return DecoderLayer(
            input_norm=self.norm(f"{name}.input_layernorm", size),
            attention=self._attention(f"{name}.self_attn"),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm", size),
            mlp=self._mlp(f"{name}.mlp"),
        )

    def _attention(self, name: str) -> Attention:
        spec = self.spec
        outputs = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        return Attention(
            qkv=self.linear(name, outputs, spec.hidden_size, spec.qkv_bias),
            output=self.linear(name, {"o_proj": spec.hidden_size}, spec.query_size, spec.output_bias),
            q_norm=self.norm(f"{name}.q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.norm(f"{name}.k_norm", spec.head_dim) if spec.qk_norm else None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )

    def _mlp(self, name: str) -> GatedMLP:
        spec = self.spec
        outputs = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        return GatedMLP(
            gate_up=self.linear(name, outputs, spec.hidden_size, spec.mlp_bias),
            down=self.linear(name, {"down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias),
        )

    def _stacked(self, name: str, kind: str, num_rows: dict[str, int], rest: tuple[int, ...]) -> Tensor:
        whole = torch.empty((sum(num_rows.values()), *rest), dtype=self.dtype, device=self.device)
        for part, view in zip(num_rows, torch.split(whole, list(num_rows.values())), strict=True):
            self.targets[f"{name}.{part}.{kind}"] = view
        return whole
