"""The forward pass as one native call, `csrc/decoder.cpp`, for packed models over the native attention's pool.

Same steps, same order as `Decoder.forward`, which stays the meaning of this and serves every other kind of attention;
what is saved is some three hundred trips through Python and torch per step. Knows addresses; computes nothing itself.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.native_cpu import NativeAttentionArgs, NativeStep
from engine.models.decoder import Decoder
from engine.models.layers import AttentionFn, DecoderLayer, Linear, RMSNorm
from engine.native import load_native
from engine.quant.panels import NativeMatrix, PackedEmbedding, PackedLinear, StackedLinear


class _Projection(ctypes.Structure):
    """`Projection` of `csrc/decoder.cpp`."""

    _fields_ = (
        ("parts", ctypes.POINTER(NativeMatrix)),
        *((name, ctypes.c_int32) for name in ("num_parts", "num_inputs", "num_outputs")),
    )


class _Layer(ctypes.Structure):
    """`Layer` of `csrc/decoder.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Projection) for name in ("qkv", "output", "gate_up", "down")),
        ("window", ctypes.c_int32),
    )


class _Args(ctypes.Structure):
    """`DecoderArgs` of `csrc/decoder.cpp`."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
        ("embedding", NativeMatrix),
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden_size", "intermediate_size")),
        ("epsilon", ctypes.c_float),
        ("attention", NativeAttentionArgs),
        ("layer_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_ids", "slots", "positions", "frequencies", "workspace", "out")),
        ("rotation_factor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_threads")),
    )


class _Program:
    """A model's description for the native call, made once, and the memory of its activations, kept between steps."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        assert isinstance(decoder.embedding, PackedEmbedding)
        self._kernels = load_native()
        self._layers = (_Layer * spec.num_layers)(
            *(_native_layer(layer, spec.sliding_window[index]) for index, layer in enumerate(decoder.layers))
        )
        self._args = _Args(
            layers=self._layers,
            final_norm=decoder.norm.weight.data_ptr(),
            embedding=decoder.embedding.matrix.native,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            epsilon=spec.rms_norm_eps,
            frequencies=decoder.rope.frequencies.data_ptr(),
            rotation_factor=decoder.rope.attention_factor,
        )
        self._workspace = torch.empty(0)

    def run(self, token_ids: Tensor, positions: Tensor, step: NativeStep) -> Tensor:
        """See `Decoder.forward`; both `[T]` int64 without gaps."""
        args = self._args
        out = torch.empty((len(token_ids), args.hidden_size))
        args.attention, args.layer_bytes = step.args, step.layer_bytes
        args.attention.kv, args.attention.q_dtype = step.layer_address(0), 0
        args.num_tokens, args.num_threads = len(token_ids), step.args.num_threads
        args.token_ids, args.slots = token_ids.data_ptr(), step.slots.data_ptr()
        args.positions, args.out = positions.data_ptr(), out.data_ptr()
        needed = self._kernels.quire_decoder_workspace(ctypes.byref(args))
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        args.workspace = self._workspace.data_ptr()
        status = self._kernels.quire_decoder_forward(ctypes.byref(args))
        if status == 2:
            raise IndexError(f"a token id is outside the vocabulary of {args.embedding.num_outputs}")
        assert status == 0, "a form or dtype that the kernels do not know"
        return out


@dataclass(frozen=True, slots=True, eq=False)
class NativeDecoder(Decoder):
    """A decoder whose weights are packed; over the native attention its forward is a single call."""

    program: _Program

    @classmethod
    def of(cls, decoder: Decoder) -> "NativeDecoder":
        """The same model. Its linears must be packed ones; it is computed in float32 whatever its `dtype`."""
        fields = {name: getattr(decoder, name) for name in Decoder.__dataclass_fields__}
        return cls(**fields, program=_Program(decoder))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """See `Decoder.forward`."""
        if not isinstance(attend, NativeStep):
            return Decoder.forward(self, token_ids, positions, attend)
        return self.program.run(token_ids.contiguous(), positions.contiguous(), attend)


def _native_layer(layer: DecoderLayer, window: int | None) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    return _Layer(
        input_norm=layer.input_norm.weight.data_ptr(),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        q_norm=_address(attention.q_norm),
        k_norm=_address(attention.k_norm),
        qkv=_projection(attention.qkv),
        output=_projection(attention.output),
        gate_up=_projection(mlp.gate_up),
        down=_projection(mlp.down),
        window=window or 0,
    )


def _address(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _projection(linear: Linear) -> _Projection:
    parts = list(_parts(linear))
    matrices = (NativeMatrix * len(parts))(*(part.native for part in parts))
    num_outputs = sum(part.num_outputs for part in parts)
    return _Projection(matrices, len(parts), parts[0].num_inputs, num_outputs)


def _parts(linear: Linear) -> Iterable[PackedLinear]:
    if isinstance(linear, StackedLinear):
        return linear.parts
    assert isinstance(linear, PackedLinear), f"{type(linear).__name__} is not packed"
    return (linear,)
