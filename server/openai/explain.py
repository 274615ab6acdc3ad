"""`cache_explain`: what the prefix cache knew of a prompt, where that ended, and why; in the answer's last words.

Where several keys share a server, an answer must not tell one of them what others asked: then differences are placed at
the block's start, and other salts are not mentioned. Text shown is the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.journal import Miss, MissReason
from kvpool.table import blocks_for
from server.config import ServerConfig
from server.openai.schema.common import CommonFields

if TYPE_CHECKING:
    from scheduler.handle import RequestHandle
    from server.openai.generation import Generation
    from server.text.tokenizer import Tokenizer

CACHE_EXPLAIN = "cache_explain"
"""The field of request and answer."""

NUM_TOKENS_AROUND = 16
"""Tokens of text shown on each side of the first difference."""

_FOREIGN = (MissReason.SALT, MissReason.ADAPTER)


@dataclass(frozen=True, slots=True)
class ExplainStyle:
    """How much may be told.

    Attributes:
        is_exact: the first differing token, not only its block.
        tells_foreign: whether other salts and adapters may be mentioned.
    """

    block_size: int
    is_exact: bool
    tells_foreign: bool


def explain_style(body: CommonFields, config: ServerConfig) -> ExplainStyle | None:
    """What a request is told; None when it did not ask."""
    if not body.cache_explain:
        return None
    is_shared = config.api_key_file is not None or len(config.api_key) > 1
    return ExplainStyle(config.block_size, not is_shared or body.cache_salt is not None, not is_shared)


def explanations(generation: Generation, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One for each prompt, in order."""
    style = generation.plan.output.explain
    assert style is not None, "explained only when asked"
    return [_explained(handle, style, tokenizer) for handle in generation.handles]


def _explained(handle: RequestHandle, style: ExplainStyle, tokenizer: Tokenizer) -> dict[str, Any]:
    miss = _allowed(handle.cache_miss, style)
    return {
        "prompt_tokens": len(handle.request.prompt_ids),
        "cached_tokens": handle.num_cached_tokens,
        "matched_blocks": blocks_for(handle.num_cached_tokens, style.block_size),
        "block_size": style.block_size,
        "reason": None if miss is None else miss.reason.value,
        "first_difference": None if miss is None else _place(handle.request.prompt_ids, miss.position, tokenizer),
    }


def _allowed(miss: Miss | None, style: ExplainStyle) -> Miss | None:
    if miss is None:
        return None
    reason = MissReason.NEVER_SEEN if miss.reason in _FOREIGN and not style.tells_foreign else miss.reason
    position = miss.position if style.is_exact else miss.position // style.block_size * style.block_size
    return Miss(reason, position)


def _place(prompt_ids: tuple[int, ...], position: int, tokenizer: Tokenizer) -> dict[str, Any]:
    before = prompt_ids[max(0, position - NUM_TOKENS_AROUND) : position]
    after = prompt_ids[position : position + NUM_TOKENS_AROUND]
    return {
        "position": position,
        "before": tokenizer.decode(before, skip_special_tokens=False),
        "after": tokenizer.decode(after, skip_special_tokens=False),
    }
