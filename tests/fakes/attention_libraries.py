"""Stand-ins for flash-attn and FlashInfer on a CPU: their signatures as documented, their demands checked, their sums
done one row at a time in float32 from the page tables they are given.

What they refuse is what the libraries' own checks refuse (flash-attn's `flash_api.cpp`, FlashInfer's `prefill.py` and
`batch_prefill.cu`), and also what they would serve only by copying a pool. They prove indexing, lengths and windows of
the backends that call them; nothing about the libraries' kernels.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


def attend_row(q: Tensor, keys: Tensor, values: Tensor, scale: float, sides: tuple[int, int]) -> Tensor:
    """`[n, heads, head_dim]` queries, the last n positions of `[length, kv_heads, head_dim]` keys -> as q.

    Query i sees keys from `p - sides[0]` to `p + sides[1]`, p being its position; a negative side is unbounded.
    """
    group = q.shape[1] // keys.shape[1]
    key = torch.arange(len(keys))[None]
    position = torch.arange(len(keys) - len(q), len(keys))[:, None]
    hidden = torch.zeros(len(q), len(keys), dtype=torch.bool)
    if sides[0] >= 0:
        hidden |= key < position - sides[0]
    if sides[1] >= 0:
        hidden |= key > position + sides[1]
    wide_keys, wide_values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_keys) * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_values).to(q.dtype)


def pages_of(pool: Tensor, page_ids: Sequence[int], length: int) -> Tensor:
    """The first `length` tokens of pages `[block, block_size, kv_head, head_dim]`."""
    return pool[list(page_ids)].flatten(0, 1)[:length]


def check_pool(k: Tensor, v: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    assert k.dtype == v.dtype == dtype
    assert dtype in HALF_TYPES
    assert k.dim() == v.dim() == 4
    assert k.shape == v.shape
    assert k.shape[3] == head_dim
    assert k.stride() == v.stride(), "k/v strides must be identical"
    assert k.stride(-1) == 1, "last dimension must be contiguous"
    assert all(stride % 8 == 0 for stride in k.stride()[:3]), "rows are loaded 16 bytes at a time"
    assert k.data_ptr() % 16 == v.data_ptr() % 16 == 0


def check_numbers(tensor: Tensor, *shape: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.shape == shape
    assert tensor.is_contiguous()


# ---------------------------------------------------------------------------------------------------------- flash-attn


def _check_flash(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> None:
    check_pool(k_cache, v_cache, q.shape[-1], q.dtype)
    assert q.stride(-1) == 1
    assert q.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0, "it would pad a copy of the pool"
    assert q.shape[-2] % k_cache.shape[2] == 0
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    check_numbers(block_table, len(block_table), block_table.shape[1])


def _sides(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """As flash-attn's: causal means nothing after the query, whatever the window says."""
    return (window_size[0], 0) if causal else window_size


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """`q [B, n, heads, head_dim]`; row b's keys are the first `cache_seqlens[b]` tokens of its pages."""
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    assert all(argument is None for argument in unused)
    assert (softcap, rotary_interleaved, num_splits, return_softmax_lse) == (0.0, True, 0, False)
    assert len(q) > 0, "batch size must be positive"
    _check_flash(q, k_cache, v_cache, block_table)
    check_numbers(cache_seqlens, len(q))
    assert len(block_table) == len(q)
    out = torch.empty(q.shape, dtype=q.dtype)
    for row, length in enumerate(cache_seqlens.tolist()):
        page_ids = block_table[row, : -(-length // k_cache.shape[1])].tolist()
        keys, values = (pages_of(pool, page_ids, length) for pool in (k_cache, v_cache))
        out[row] = attend_row(q[row], keys, values, softmax_scale, _sides(causal, window_size))
    return out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """`q [T, heads, head_dim]`; row r has queries and keys as the sums of both say, its keys on its pages."""
    unused = (dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs)
    assert unused == (0.0, 0.0, None, False, False)
    num_rows = len(cu_seqlens_q) - 1
    assert num_rows > 0, "batch size must be positive"
    _check_flash(q, k, v, block_table)
    check_numbers(cu_seqlens_q, num_rows + 1)
    check_numbers(cu_seqlens_k, num_rows + 1)
    assert len(block_table) == num_rows
    starts, sums = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (starts[0], starts[-1], sums[0]) == (0, len(q), 0)
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    out = torch.empty(q.shape, dtype=q.dtype)
    for row in range(num_rows):
        queries, length = slice(starts[row], starts[row + 1]), sums[row + 1] - sums[row]
        page_ids = block_table[row, : -(-length // k.shape[1])].tolist()
        keys, values = (pages_of(pool, page_ids, length) for pool in (k, v))
        out[queries] = attend_row(q[queries], keys, values, softmax_scale, _sides(causal, window_size))
    return out


# ---------------------------------------------------------------------------------------------------------- FlashInfer


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans on the host, then runs as often as it is asked to."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        assert all(buffer is None for buffer in (*buffers, custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs))
        assert (kv_layout, use_cuda_graph, backend) == ("NHD", False, "fa2")
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.nbytes >= 128 << 20
        assert float_workspace_buffer.data_ptr() % 16 == 0
        self.num_plans = 0

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        non_blocking=True,
    ):
        assert all(x is None for x in (head_dim_vo, custom_mask, packed_custom_mask, logits_soft_cap))
        assert (rope_scale, rope_theta, pos_encoding_mode, use_fp16_qk_reduction) == (None, None, "NONE", False)
        assert non_blocking
        assert head_dim_qk in (64, 128, 256)
        num_rows = len(qo_indptr) - 1
        check_numbers(qo_indptr, num_rows + 1)
        check_numbers(paged_kv_indptr, num_rows + 1)
        check_numbers(paged_kv_indices, int(paged_kv_indptr[-1]))
        check_numbers(paged_kv_last_page_len, num_rows)
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert qo_indptr.diff().min() > 0, "a row without queries"
        assert paged_kv_indptr.diff().min() > 0, "a row without keys"
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        self.num_plans += 1
        self._starts, self._causal, self._scale, self._window_left = qo_indptr.tolist(), causal, sm_scale, window_left
        self._indptr, self._indices = paged_kv_indptr.tolist(), paged_kv_indices.tolist()
        self._last, self._page_size = paged_kv_last_page_len.tolist(), page_size
        self._heads, self._head_dim = (num_qo_heads, num_kv_heads), head_dim_qk
        self._dtypes = (q_data_type, kv_data_type)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
    ):
        assert not args
        assert all(x is None for x in (k_scale, v_scale, lse, enable_pdl, window_left))
        assert not return_lse
        k_cache, v_cache = paged_kv_cache
        assert (q.dtype, k_cache.dtype) == self._dtypes
        check_pool(k_cache, v_cache, self._head_dim, q.dtype)
        assert k_cache.shape[1:3] == (self._page_size, self._heads[1])
        assert q.shape == (self._starts[-1], self._heads[0], self._head_dim)
        assert q.stride(-1) == 1
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        sides = (self._window_left, 0 if self._causal else -1)
        for row, last in enumerate(self._last):
            page_ids = self._indices[self._indptr[row] : self._indptr[row + 1]]
            length = (len(page_ids) - 1) * self._page_size + last
            keys, values = (pages_of(pool, page_ids, length) for pool in (k_cache, v_cache))
            queries = slice(self._starts[row], self._starts[row + 1])
            out[queries] = attend_row(q[queries], keys, values, self._scale, sides)
        return out


def fake_flash_attn() -> ModuleType:
    """What `import flash_attn` gives."""
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def fake_flashinfer() -> ModuleType:
    """What `import flashinfer` gives."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module
