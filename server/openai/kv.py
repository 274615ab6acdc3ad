"""`GET /v1/kv`: the KV pool for operators. Hashes and sizes; no text and no tokens."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvpool.layout import KVLayout
from scheduler.kv_report import KVReport, SharedUse
from server.openai.openapi import errors
from server.openai.schema.answers import KVState
from server.openai.service import ready, state_of
from server.state import Served

router = APIRouter(tags=["kv"])

MAX_PREFIXES = 100


@router.get("/v1/kv", response_model=KVState, responses=errors(400, 401, 503))
async def kv_state(request: Request, top: Annotated[int, Query(ge=0, le=MAX_PREFIXES)] = 10) -> JSONResponse:
    """Occupancy, waste, hit rate, age of blocks, and the `top` most useful shared prefixes."""
    return JSONResponse(kv_summary(ready(state_of(request)), top))


def kv_summary(served: Served, num_prefixes: int) -> dict[str, Any]:
    """What the route answers."""
    report, stats, layout = served.scheduler.kv_report(num_prefixes), served.scheduler.stats(), served.kv_layout
    pool, block_bytes = report.pool, layout.bytes_per_block
    return {
        "object": "kv",
        "kv_dtype": served.kv_dtype,
        "block_size": report.block_size,
        "bytes_per_token": layout.bytes_per_token,
        "bytes_per_block": block_bytes,
        "blocks": {
            "total": pool.num_blocks,
            "referenced": pool.num_referenced,
            "cached": pool.num_cached,
            "free": pool.num_free,
            "pinned": stats.num_pinned_blocks,
        },
        "occupancy": pool.usage,
        "fragmentation": _fragmentation(report, layout),
        "prefix_cache": {
            "queried_tokens": report.num_queried_tokens,
            "hit_tokens": report.num_hit_tokens,
            "hit_rate": report.hit_rate,
            "evicted_blocks": pool.evictions,
        },
        "block_age_s": _ages(report.ages_s),
        "tiers": [asdict(tier) for tier in stats.tiers],
        "top_prefixes": [_prefix(use, layout) for use in report.shared],
    }


def _fragmentation(report: KVReport, layout: KVLayout) -> dict[str, Any]:
    """Positions of referenced blocks that no token has: at the end of each sequence, less than a block."""
    return {
        "unused_tokens": report.num_unused_slots,
        "bytes": report.num_unused_slots * layout.bytes_per_token,
        "percent": 100 * report.waste,
    }


def _ages(ages_s: Sequence[float]) -> dict[str, Any]:
    """Since findable blocks were filled."""
    if not ages_s:
        return {"count": 0, "newest": None, "median": None, "oldest": None}
    return {
        "count": len(ages_s),
        "newest": round(min(ages_s), 3),
        "median": round(statistics.median(ages_s), 3),
        "oldest": round(max(ages_s), 3),
    }


def _prefix(use: SharedUse, layout: KVLayout) -> dict[str, Any]:
    return {
        "hash": use.digest.hex()[:16],
        "blocks": use.num_blocks,
        "tokens": use.num_blocks * layout.block_size,
        "bytes": use.num_blocks * layout.bytes_per_block,
        "hits": use.num_hits,
        "holders": use.num_holders,
    }
