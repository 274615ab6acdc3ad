"""Triton kernels over the paged pool: storing keys and values, attending, merging what was attended in parts.

A key of the pool is found by strides, in elements, from the pointer of one layer's keys:

    pool + block * block_stride + offset * token_stride + kv_head * head_dim         its value `value_offset` further

so any block size works. In a quantized pool elements are one-byte codes and scales are float16 inside the same cells
(`kvpool.storage`): a scale lies at half its cell's offset from the pointer of that layer's key scales.

Program ids and lengths are read on the device: nothing about a launch depends on how long a context is, so a launch can
be captured once and replayed. Importing this module imports triton; `engine.attention.triton_paged` is who calls.
"""

# A kernel's parameters are its launch: many, and upper case where compile-time. Their types exist on the device.
# ruff: noqa: N803, N806, PLR0913
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    k,
    v,
    pool,
    scales,
    slot_mapping,
    num_tokens,
    k_token_stride,
    v_token_stride,
    block_stride,
    token_stride,
    value_offset,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Keys and values into the pool. Grid (tiles of BLOCK_T tokens, kv heads); a negative slot stores nothing."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    address = _address(slot, block_stride, token_stride, BLOCK_SIZE)
    token = token.to(tl.int64)[:, None]
    key = k + token * k_token_stride + head * HEAD_DIM + dims[None, :]
    value = v + token * v_token_stride + head * HEAD_DIM + dims[None, :]
    mask = (slot >= 0)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    first = tl.load(key, mask=mask, other=0.0)
    second = tl.load(key + HEAD_DIM // 2, mask=mask, other=0.0)
    _store_halves(first, second, pool, scales, address, head, mask, HEAD_DIM, LARGEST)
    first = tl.load(value, mask=mask, other=0.0)
    second = tl.load(value + HEAD_DIM // 2, mask=mask, other=0.0)
    _store_halves(first, second, pool, scales, address + value_offset, head, mask, HEAD_DIM, LARGEST)


@triton.jit
def rotate_store_kernel(
    qkv,
    q_out,
    pool,
    scales,
    slot_mapping,
    cos,
    sin,
    q_norm,
    k_norm,
    qkv_stride,
    block_stride,
    token_stride,
    value_offset,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Norm and rotation of queries and keys, then keys and values into the pool. Grid (tokens, kv heads).

    A program takes the GROUP query heads that share its kv head. Halves of a head are loaded side by side, for the
    rotation pairs `(i, i + HEAD_DIM / 2)`. A negative slot stores nothing.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    mask = dims < HALF
    turn_cos = tl.load(cos + token * HALF + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    turn_sin = tl.load(sin + token * HALF + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    source = qkv + token * qkv_stride

    member = tl.arange(0, BLOCK_GROUP)
    cells = (kv_head * GROUP + member)[:, None] * HEAD_DIM + dims[None, :]
    cells_mask = (member < GROUP)[:, None] & mask[None, :]
    first = tl.load(source + cells, mask=cells_mask, other=0.0)
    second = tl.load(source + cells + HALF, mask=cells_mask, other=0.0)
    if NORMED:
        first, second = _norm_halves(first, second, q_norm, eps, HALF)
    first, second = _rotate(first, second, turn_cos, turn_sin)
    out = q_out + token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + cells
    tl.store(out, first, mask=cells_mask)
    tl.store(out + HALF, second, mask=cells_mask)

    slot = tl.load(slot_mapping + token)
    stored = (dims < tl.where(slot >= 0, HALF, 0))[None, :]
    address = _address(slot + tl.zeros([1], tl.int64), block_stride, token_stride, BLOCK_SIZE)
    key = source + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM + dims[None, :]
    first = tl.load(key, mask=stored, other=0.0)
    second = tl.load(key + HALF, mask=stored, other=0.0)
    if NORMED:
        first, second = _norm_halves(first, second, k_norm, eps, HALF)
    first, second = _rotate(first, second, turn_cos, turn_sin)
    _store_halves(first, second, pool, scales, address, kv_head, stored, HEAD_DIM, LARGEST)
    value = key + NUM_KV_HEADS * HEAD_DIM
    first = tl.load(value, mask=stored, other=0.0)
    second = tl.load(value + HALF, mask=stored, other=0.0)
    _store_halves(first, second, pool, scales, address + value_offset, kv_head, stored, HEAD_DIM, LARGEST)


@triton.jit(do_not_specialize=["table_stride", "num_segments"])
def attention_kernel(
    q,
    out,
    part_out,
    part_lse,
    pool,
    scales,
    block_tables,
    query_starts,
    context_lens,
    tile_rows,
    tile_firsts,
    q_token_stride,
    table_stride,
    block_stride,
    token_stride,
    value_offset,
    score_scale,
    num_segments,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SEGMENT_TILES: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022). Grid (tiles, kv heads, segments).

    A tile is TILE_QUERIES consecutive queries of one row, times the GROUP query heads of one kv head: the BLOCK_M lanes
    of the left matrix. Its keys are walked BLOCK_N at a time. When it SPLITS them, each segment walks its share
    and leaves a normalised part and the base-2 logarithm of its weights' sum, `-inf` where it had no key
    (Flash-Decoding, Dao et al. 2023); `merge_kernel` puts them together.

    `score_scale` includes log2(e): all exponentials are powers of two. WINDOW 0 is no window.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    row = tl.load(tile_rows + tile).to(tl.int64)
    first_query = tl.load(tile_firsts + tile)
    row_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - row_start
    num_past = tl.load(context_lens + row) - num_queries

    lane = tl.arange(0, BLOCK_M)
    query = first_query + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    live = (lane < TILE_QUERIES * GROUP) & (query < num_queries)
    position = num_past + query
    token = (row_start + query).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    q_cells = token[:, None] * q_token_stride + head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + q_cells, mask=live[:, None] & in_head[None, :], other=0.0)

    # Keys first_key .. end_key - 1 are seen by some query of the tile; this segment walks low .. high - 1 of them.
    end_key = num_past + tl.minimum(first_query + TILE_QUERIES, num_queries)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(0, num_past + first_query - WINDOW + 1)
    num_tiles = tl.cdiv(tl.maximum(end_key - first_key, 0), BLOCK_N)
    tiles_each = tl.maximum(tl.cdiv(num_tiles, num_segments), MIN_SEGMENT_TILES)
    low = first_key + segment * tiles_each * BLOCK_N
    high = tl.minimum(low + tiles_each * BLOCK_N, end_key)

    table = block_tables + row * table_stride
    heads_of = pool + kv_head * HEAD_DIM
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = key < high
        block = tl.load(table + key // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        address = block * block_stride + (key % BLOCK_SIZE) * token_stride
        cells = address[:, None] + dims[None, :]
        cells_mask = held[:, None] & in_head[None, :]  # past the end lie zeros, whatever the pool holds there
        keys = tl.load(heads_of + cells, mask=cells_mask, other=0.0).to(queries.dtype)
        values = tl.load(heads_of + value_offset + cells, mask=cells_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * score_scale
        if QUANTIZED:  # keys' scales multiply whole columns of scores, values' must come before the sum over keys
            scales_of = scales + kv_head + address // 2
            scores *= tl.load(scales_of, mask=held, other=0.0).to(tl.float32)[None, :]
            value_scales = tl.load(scales_of + value_offset // 2, mask=held, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) * value_scales[:, None]).to(queries.dtype)
        visible = held[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top

    seen = total > 0.0
    mixed = mixed / tl.where(seen, total, 1.0)[:, None]
    if SPLITS:
        part = (token * NUM_HEADS + head) * num_segments + segment
        lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(part_lse + part, lse, mask=live)
        cells = part[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part_out + cells, mixed, mask=(live & seen)[:, None] & in_head[None, :])
    else:
        cells = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + cells, mixed.to(out.dtype.element_ty), mask=live[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["num_segments"])
def merge_kernel(
    part_out,
    part_lse,
    out,
    num_segments,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
):
    """One (token, head) from its segments' parts, each weighted by its share of the softmax. Grid (tokens, heads).

    A head that saw no key at all (a padding row) becomes zeros.
    """
    cell = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    segment = tl.arange(0, MAX_SEGMENTS)
    part = cell * num_segments + segment
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    lse = tl.load(part_lse + part, mask=segment < num_segments, other=float("-inf"))
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    mask = (lse > float("-inf"))[:, None] & in_head[None, :]
    parts = tl.load(part_out + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + cell * HEAD_DIM + dims, mixed.to(out.dtype.element_ty), mask=in_head)


@triton.jit
def _address(slot, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    """Where a token slot's kv heads begin, in elements from a layer's keys, int64."""
    slot = slot.to(tl.int64)
    return (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride


@triton.jit
def _store_halves(first, second, pool, scales, address, head, mask, HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr):
    """One head of some tokens, as two halves `[T, BLOCK_HALF]`, at `address` `[T]`. LARGEST 0 stores it as it is."""
    if LARGEST > 0:
        first, second, scale = _quantize_halves(first, second, LARGEST)
        tl.store(scales + head + address[:, None] // 2, scale[:, None], mask=_any_column(mask))
    cells = pool + address[:, None] + head * HEAD_DIM + tl.arange(0, mask.shape[1])[None, :]
    tl.store(cells, first.to(pool.dtype.element_ty), mask=mask)
    tl.store(cells + HEAD_DIM // 2, second.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _any_column(mask):
    """`[T, BLOCK_HALF]` -> `[T, 1]`: whether the token is stored at all."""
    return (tl.max(mask.to(tl.int32), 1) > 0)[:, None]


@triton.jit
def _quantize_halves(first, second, LARGEST: tl.constexpr):
    """`kvpool.quant.quantize`, to the bit: codes (in float32 still) of two halves `[T, BLOCK_HALF]`, scales `[T]`."""
    low, high = first.to(tl.float32), second.to(tl.float32)
    not_numbers = tl.max(tl.maximum((low != low).to(tl.int32), (high != high).to(tl.int32)), 1) > 0
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    scale = tl.minimum(largest * (1.0 / LARGEST), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    wide = tl.where(not_numbers, float("nan"), wide)
    inverse = tl.where(wide == 0.0, 0.0, tl.div_rn(1.0, tl.where(wide == 0.0, 1.0, wide)))[:, None]
    return _codes(low * inverse, LARGEST), _codes(high * inverse, LARGEST), wide.to(tl.float16)


@triton.jit
def _codes(x, LARGEST: tl.constexpr):
    """Codes of x in steps of the scale, rounded to the nearest one, halves to even; 0 for NaN.

    Adding and taking away 1.5 * 2**23 steps rounds to whole steps, as floats of that size have no smaller ones. The
    step is 1 for integers; for e4m3 an eighth of the power of two below, and 2**-9 for its smallest. (To leave the
    rounding to the conversion would do on a GPU; Triton's interpreter gets it wrong.)
    """
    codes = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)  # NaN equals nothing
    if LARGEST == 127.0:
        return (codes + 12582912.0) - 12582912.0
    bits = codes.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0
    rounded = ((codes + shift) - shift).to(tl.int32, bitcast=True)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)  # what rounds to zero keeps its sign


@triton.jit
def _norm_halves(first, second, weight, eps, HALF: tl.constexpr):
    """RMSNorm of heads held as two halves `[H, BLOCK_HALF]`, in float32, rounded once to their dtype."""
    dims = tl.arange(0, first.shape[1])
    low, high = first.to(tl.float32), second.to(tl.float32)
    square_sum = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    scale = tl.rsqrt(square_sum / (2 * HALF) + eps)[:, None]
    low_weight = tl.load(weight + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    high_weight = tl.load(weight + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    return (low * scale * low_weight).to(first.dtype), (high * scale * high_weight).to(second.dtype)


@triton.jit
def _rotate(first, second, cos, sin):
    """The rotation of `engine.models.layers.Rotation`, in float32, rounded once."""
    low, high = first.to(tl.float32), second.to(tl.float32)
    return (low * cos - high * sin).to(first.dtype), (high * cos + low * sin).to(second.dtype)
