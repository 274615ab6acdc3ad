"""What a decoder-only model is, as data: sizes, switches and rotary settings. Torch-free.

Knows numbers only. `families` fills it from a checkpoint's own words, `decoder` computes from it; neither a model's
name nor its file format survives past this point.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position settings; `engine.models.rope` holds the formulas. Fields that a kind does not use keep defaults.

    Attributes:
        kind: `factors` divides each frequency by a number stored in the checkpoint (GGUF's form of llama3 scaling).
        theta: base of the geometric series of wavelengths.
        factor: how much longer the context is than the trained one (linear, dynamic, llama3, yarn).
        original_context: trained context in tokens (dynamic, llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's bounds of the smoothed band.
        beta_fast, beta_slow, truncate: yarn's ramp, in rotations, and whether its ends are rounded outwards.
        attention_factor: scales cos and sin, so attention logits grow by its square (yarn).
        frequency_factors: one divisor per frequency, `head_dim / 2` of them (factors).
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with rotary grouped-query attention and a gated SiLU MLP.

    Attributes:
        qkv_bias, output_bias: biases of the attention's input and output projections.
        mlp_bias: biases of gate, up and down.
        qk_norm: RMSNorm over each head of queries and keys, before the rotation.
        sliding_window: one entry per layer; with window `w`, position `p` sees `p - w + 1 .. p`; None sees everything.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    sliding_window: tuple[int | None, ...]

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for name in (*sizes, "vocab_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if len(self.sliding_window) != self.num_layers:
            raise ValueError(f"{len(self.sliding_window)} sliding windows for {self.num_layers} layers")

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """The longest context, in tokens, that the position scaling is meant for: more cannot be served.

        Configurations of linear, dynamic and yarn scaling name the trained length and a factor; llama3's names the
        scaled length itself.
        """
        rope = self.rope
        if rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return max(self.max_position_embeddings, int(rope.original_context * rope.factor))
        return self.max_position_embeddings

    @property
    def default_context(self) -> int:
        """The context, in tokens, to serve unless asked for another: `max_context`; trained, if dynamic.

        Dynamic scaling changes every position once more than the trained context is served (see `engine.models.rope`),
        so that is for the operator to ask for.
        """
        return self.max_position_embeddings if self.rope.kind == "dynamic" else self.max_context
