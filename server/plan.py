"""`quire plan`: what fits a memory, before anything is bought, downloaded or loaded.

Reads a model's configuration (or takes its sizes from flags) and does arithmetic; knows no device and loads no weights.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

from engine.errors import LoadError
from engine.shape import WEIGHT_BITS, ModelShape, read_shape
from kvpool.capacity import Capacity
from kvpool.layout import KV_CACHE_DTYPES, KVLayout, element_and_scale_bytes
from server.flags import choice, integer, number, size

GIB = 1 << 30
CARDS = (8 * GIB, 16 * GIB, 24 * GIB)
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
WEIGHT_KINDS = ("int8", "int4", "int4_g128")
"""Quantized ones, the mildest first."""
TABLE_WEIGHTS = ("float16", *WEIGHT_KINDS)
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, besides the model.

    Attributes:
        weights: one of `WEIGHT_BITS`.
        dtype: of the computation, and of the KV cache unless it is quantized.
        reserve: bytes, or a share of the memory.
    """

    memory_bytes: int
    dtype: str
    weights: str
    kv_cache_dtype: str
    block_size: int
    reserve: int | float

    def capacity(self, shape: ModelShape) -> Capacity:
        """The arithmetic for one model."""
        sizes = element_and_scale_bytes(self.kv_cache_dtype, ELEMENT_BYTES[self.dtype])
        layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, self.block_size, *sizes)
        reserve = self.reserve if isinstance(self.reserve, int) else int(self.memory_bytes * self.reserve)
        return Capacity(self.memory_bytes, shape.weight_bytes(self.weights), reserve, layout)


def main(argv: Sequence[str]) -> int:
    """Run `quire plan ARGV`; returns 0, 1 when what was asked for does not fit, 2 for wrong usage or no such model."""
    args = _parser().parse_args(argv)
    try:
        shape = _shape_of(args)
        settings = _settings_of(args)
    except (LoadError, ValueError) as error:
        sys.stderr.write(f"quire plan: {error}\n")
        return 2
    capacity = settings.capacity(shape)
    fits = does_fit(capacity, args.context, args.users)
    if args.json:
        answer = summary(shape, settings, args.context, args.users) | {"fits": fits}
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    elif args.table:
        sys.stdout.write("\n".join(table(shape, settings)) + "\n")
    else:
        lines = [*account(shape, settings), "", *verdict(shape, settings, args.context, args.users)]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits or args.table else 1


# ------------------------------------------------------------------------------------------------------- what was asked


def count(text: str) -> int:
    """A number of parameters: 8030261248, 135M, 8.03B."""
    match = _COUNT.fullmatch(text.strip())
    value = Fraction(match[1]) * 1000 ** " kmbt".index(match[2].lower() or " ") if match else Fraction(0)
    if value < 1:
        raise ValueError("a number of parameters such as 8.03B, 135M or 134515008")
    return round(value)


def reserve(text: str) -> int | float:
    """Bytes, or a share such as 10%."""
    if text.strip().endswith("%"):
        return float(number(0, 99)(text.strip()[:-1])) / 100
    return size(text)


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """One of `server.flags`' parsers for argparse, its message kept."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from error

    return convert


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire plan",
        description="What fits a memory: tokens, contexts and users. Reads the model's configuration only.",
        epilog="Without a model's files, give --layers, --kv-heads, --head-dim and --parameters.",
        allow_abbrev=False,
    )
    positive = _typed(integer(1))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id (the embedded model)")
    parser.add_argument("--memory", type=_typed(size), default=24 * GIB, metavar="SIZE", help="of the card (24GiB)")
    parser.add_argument("--dtype", type=_typed(choice(*ELEMENT_BYTES)), default="float16", help="(float16)")
    parser.add_argument(
        "--quantization",
        type=_typed(choice("none", *WEIGHT_KINDS)),
        default="none",
        help="none, int8, int4 or int4_g128 weights (none)",
    )
    parser.add_argument(
        "--kv-cache-dtype", type=_typed(choice(*KV_CACHE_DTYPES)), default="auto", help="auto, int8 or fp8 (auto)"
    )
    parser.add_argument(
        "--reserve",
        type=_typed(reserve),
        default=0.1,
        metavar="SIZE",
        help="bytes, or a share, for activations, the driver and others: what --gpu-memory-utilization leaves (10%%)",
    )
    parser.add_argument("--context", type=positive, metavar="N", help="tokens of one conversation")
    parser.add_argument("--users", type=positive, metavar="M", help="conversations at once")
    parser.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens in a KV block (16)")
    for name, what in (("layers", "layers"), ("kv-heads", "key/value heads"), ("head-dim", "size of a head")):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=f"{what} of a model without files")
    parser.add_argument("--parameters", type=_typed(count), metavar="N", help="its parameters, as in 8.03B")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="float16 and quantized weights on 8, 16 and 24 GiB")
    form.add_argument("--json", action="store_true", help="the numbers as JSON")
    return parser


def _shape_of(args: argparse.Namespace) -> ModelShape:
    sizes = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    given = [name for name, value in {**sizes, "--parameters": args.parameters}.items() if value is not None]
    if not given:
        return read_shape(args.model)
    missing = [name for name in (*sizes, "--parameters") if name not in given]
    if missing:
        raise ValueError(f"{given[0]} describes a model without files; give {', '.join(missing)} too")
    if args.model is not None:
        raise ValueError(f"give either MODEL or {given[0]}, not both")
    return ModelShape("the model", args.parameters, args.layers, args.kv_heads, args.head_dim)


def _settings_of(args: argparse.Namespace) -> Settings:
    weights = args.dtype if args.quantization == "none" else args.quantization
    return Settings(args.memory, args.dtype, weights, args.kv_cache_dtype, args.block_size, args.reserve)


# ----------------------------------------------------------------------------------------------------------- the answer


def does_fit(capacity: Capacity, context: int | None, num_users: int | None) -> bool:
    """Whether the conversations asked for fit; without any, whether a block does."""
    return capacity.num_users(context or capacity.layout.block_size) >= (num_users or 1)


def account(shape: ModelShape, settings: Settings) -> Iterator[str]:
    """Where the memory goes, line by line."""
    capacity = settings.capacity(shape)
    layout = capacity.layout
    bits = float(WEIGHT_BITS[settings.weights][0])
    scale = f" + {layout.scale_bytes}" if layout.is_quantized else ""
    formula = f"2 x {layout.num_layers} layers x {layout.num_kv_heads} heads x ({layout.head_dim} x "
    share = f"{settings.reserve:.0%} of the memory" if isinstance(settings.reserve, float) else "as asked"
    yield f"{shape.name}: {shape.num_parameters:,} parameters"
    yield _line("memory", _gib(capacity.memory_bytes))
    yield _line("weights", _gib(capacity.weight_bytes), f"{settings.weights}, {bits:g} bits each")
    yield _line("reserve", _gib(capacity.reserve_bytes), share)
    yield _line("left for KV", _gib(capacity.kv_budget_bytes))
    yield _line("KV per token", f"{layout.bytes_per_token:,} B", f"{formula}{layout.element_bytes}{scale}) bytes")
    yield _line("tokens", f"{capacity.num_tokens:,}", f"{capacity.num_blocks:,} blocks of {layout.block_size}")


def verdict(shape: ModelShape, settings: Settings, context: int | None, num_users: int | None) -> Iterator[str]:
    """What fits, for what was asked; and what to change when it does not."""
    capacity = settings.capacity(shape)
    if does_fit(capacity, context, num_users):
        yield from _what_fits(capacity, shape, context, num_users)
        return
    wanted = f"{num_users or 1:,} x {context or capacity.layout.block_size:,} tokens"
    if capacity.kv_budget_bytes < 0:
        yield f"Does not fit: weights and reserve alone are {_gib(-capacity.kv_budget_bytes)} more than the memory."
    else:
        yield f"Does not fit: {wanted} of KV in {_gib(capacity.kv_budget_bytes)}."
    yield "What would:"
    yield from (f"  {line}" for line in advice(shape, settings, context, num_users))


def _what_fits(capacity: Capacity, shape: ModelShape, context: int | None, num_users: int | None) -> Iterator[str]:
    if context is not None:
        yield f"{capacity.num_users(context):,} users of {context:,} tokens fit."
    if num_users is not None:
        longest = capacity.longest_context(num_users)
        yield f"{num_users:,} users of {min(longest, shape.max_context or longest):,} tokens fit."
    if context is None and num_users is None:
        yield "context x users that fit:"
        for each, users in contexts(capacity, shape):
            yield f"  {each:>9,} x {users:,}"
    if context is not None and shape.max_context is not None and context > shape.max_context:
        yield f"But the model's context ends at {shape.max_context:,} tokens."


def contexts(capacity: Capacity, shape: ModelShape) -> list[tuple[int, int]]:
    """Usual contexts up to the model's own, and how many fit of each; without those of which none fits."""
    limit = shape.max_context or CONTEXTS[-1]
    each = sorted({context for context in CONTEXTS if context <= limit} | {min(limit, CONTEXTS[-1])})
    return [(context, users) for context in each if (users := capacity.num_users(context))]


def advice(shape: ModelShape, settings: Settings, context: int | None, num_users: int | None) -> Iterator[str]:
    """Changes that would make it fit, one at a time and then the smallest weights and cache together."""
    capacity = settings.capacity(shape)
    for kv_cache_dtype, weights in _smaller(settings):
        changed = replace(settings, kv_cache_dtype=kv_cache_dtype, weights=weights).capacity(shape)
        if does_fit(changed, context, num_users):
            flags = f"--kv-cache-dtype {kv_cache_dtype} " if kv_cache_dtype != settings.kv_cache_dtype else ""
            flags += f"--quantization {weights} " if weights != settings.weights else ""
            yield f"{flags}({changed.num_tokens:,} tokens)"
    if context and (users := capacity.num_users(context)):
        yield f"{users:,} users instead of {num_users or 1:,}"
    if num_users and (longest := capacity.longest_context(num_users)):
        yield f"--max-model-len {longest} for {num_users:,} users"
    needed = capacity.memory_for(context or capacity.layout.block_size, num_users or 1)
    if isinstance(settings.reserve, float):  # a share of the larger memory, then
        needed = round((needed - capacity.reserve_bytes) / (1 - settings.reserve))
    yield f"a memory of {_gib(needed)}"


def _smaller(settings: Settings) -> Iterator[tuple[str, str]]:
    """Caches and weights that take less, the mildest change first."""
    caches = (settings.kv_cache_dtype, *(["int8"] if settings.kv_cache_dtype == "auto" else []))
    kinds = (
        WEIGHT_KINDS[WEIGHT_KINDS.index(settings.weights) + 1 :] if settings.weights in WEIGHT_KINDS else WEIGHT_KINDS
    )
    both = [(cache, kind) for kind in (settings.weights, *kinds) for cache in caches]
    yield from both[1:]


def table(shape: ModelShape, settings: Settings) -> Iterator[str]:
    """tokens = (memory - weights - reserve) / KV bytes per token, over weights and cards; Markdown."""
    layout = settings.capacity(shape).layout
    bits = ", ".join(f"{weights} {float(WEIGHT_BITS[weights][0]):g}" for weights in TABLE_WEIGHTS)
    yield f"{shape.name}: {shape.num_parameters:,} parameters, {layout.bytes_per_token:,} KV bytes per token"
    yield f"tokens = (memory - weights - reserve) / KV bytes per token; bits of a weight, scales included: {bits}"
    yield ""
    yield "| weights | memory | weight bytes | reserve | for KV | tokens | contexts x users |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
    for weights in TABLE_WEIGHTS:
        for memory_bytes in CARDS:
            capacity = replace(settings, weights=weights, memory_bytes=memory_bytes).capacity(shape)
            sizes = (memory_bytes, capacity.weight_bytes, capacity.reserve_bytes, capacity.kv_budget_bytes)
            fitting = ", ".join(f"{each:,} x {users:,}" for each, users in contexts(capacity, shape)[:3]) or "none"
            cells = [weights, *map(_gib, sizes), f"{capacity.num_tokens:,}", fitting]
            yield f"| {' | '.join(cells)} |"


def summary(shape: ModelShape, settings: Settings, context: int | None, num_users: int | None) -> dict[str, Any]:
    """The same numbers for programs."""
    capacity = settings.capacity(shape)
    return {
        "model": asdict(shape),
        "memory_bytes": capacity.memory_bytes,
        "weight_bytes": capacity.weight_bytes,
        "reserve_bytes": capacity.reserve_bytes,
        "kv_budget_bytes": capacity.kv_budget_bytes,
        "kv_bytes_per_token": capacity.layout.bytes_per_token,
        "num_tokens": capacity.num_tokens,
        "num_blocks": capacity.num_blocks,
        "users": {str(each): users for each, users in contexts(capacity, shape)},
        "asked": {"context": context, "users": num_users},
        "advice": [] if does_fit(capacity, context, num_users) else list(advice(shape, settings, context, num_users)),
    }


def _line(name: str, value: str, note: str = "") -> str:
    return f"{name:<13}{value:>14}" + (f"   {note}" if note else "")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
