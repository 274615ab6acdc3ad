"""The layouts of logprobs: chat's list of tokens, completions' parallel arrays, and the prompt's list of maps.

Knows token pieces and floors; a value is finite and as the engine gave it. A token's text is what the tokenizer spells,
or `token_id:N` where ids were asked for.
"""

import math
from collections.abc import Sequence
from typing import Any

from engine.batch import TokenLogprob
from scheduler.handle import RequestHandle
from server.openai.plan import LogprobStyle
from server.text.choice import TokenPiece
from server.text.tokenizer import Tokenizer

FLOOR = -9999.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


def _name(token_id: int, style: LogprobStyle, tokenizer: Tokenizer) -> str:
    return f"token_id:{token_id}" if style.as_ids else tokenizer.token_text(token_id)


def _alternatives(logprob: TokenLogprob, style: LogprobStyle) -> list[tuple[int, float]]:
    """The likeliest tokens, as many as asked for, then the ones asked for by id."""
    pairs = list(zip(logprob.top_ids, logprob.top_logprobs, strict=True))
    extra = set(style.extra_ids)
    shown = pairs[: style.num_top]
    seen = {token_id for token_id, _ in shown}
    return shown + [pair for pair in pairs[style.num_top :] if pair[0] in extra and pair[0] not in seen]


def chat_logprobs(tokens: Sequence[TokenPiece], style: LogprobStyle, tokenizer: Tokenizer) -> dict[str, Any]:
    """`{content: [...], refusal: null}`."""
    return {"content": [_chat_entry(token, style, tokenizer) for token in tokens], "refusal": None}


def _chat_entry(token: TokenPiece, style: LogprobStyle, tokenizer: Tokenizer) -> dict[str, Any]:
    assert token.logprob is not None, "logprobs were asked for"
    top = [
        {
            "token": _name(token_id, style, tokenizer),
            "logprob": _finite(value),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }
        for token_id, value in _alternatives(token.logprob, style)
    ]
    return {
        "token": _name(token.token_id, style, tokenizer),
        "logprob": _finite(token.logprob.logprob),
        "bytes": list(token.bytes),
        "top_logprobs": top,
    }


def completion_logprobs(
    tokens: Sequence[TokenPiece], offset: int, style: LogprobStyle, tokenizer: Tokenizer
) -> dict[str, list[Any]]:
    """Parallel arrays; `offset` characters stand before these tokens' text. A token without a logprob (the first of an
    echoed prompt) has null."""
    return {
        "tokens": [_name(token.token_id, style, tokenizer) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_top_map(token.logprob, style, tokenizer) for token in tokens],
        "text_offset": [offset + token.text_offset for token in tokens],
    }


def _top_map(logprob: TokenLogprob | None, style: LogprobStyle, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The alternatives by text, the chosen token always among them. Of two tokens spelt alike the likelier counts."""
    if logprob is None:
        return None
    shown: dict[str, float] = {}
    for token_id, value in [*_alternatives(logprob, style), (logprob.token_id, logprob.logprob)]:
        shown.setdefault(_name(token_id, style, tokenizer), _finite(value))
    return shown


def prompt_logprobs(handle: RequestHandle, num_top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """One map (token id -> logprob, rank, decoded token) per prompt token; null for the first."""
    maps: list[dict[str, Any] | None] = [None]
    for logprob in handle.prompt_logprobs:
        shown = list(zip(logprob.top_ids, logprob.top_logprobs, range(1, num_top + 1), strict=False))
        chosen = (logprob.token_id, logprob.logprob, logprob.rank)
        entries = {
            str(token_id): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for token_id, value, rank in [chosen, *shown]
        }
        maps.append(entries)
    return maps
