"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer as requests use it."""

import asyncio
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from server.errors import bad_request
from server.openai.body import read_body
from server.openai.chat import check_template_allowed, render_and_encode
from server.openai.completions import encode_prompts
from server.openai.conversation import rendering, wire_tools
from server.openai.notes import Notes
from server.openai.openapi import body_of, errors
from server.openai.schema.answers import Detokenized, Tokenized, TokenizerInfo
from server.openai.schema.requests import CapacityRequest, DetokenizeRequest, PromptFields, TokenizeRequest
from server.openai.service import ready, state_of
from server.openai.settings import check_token_ids
from server.openai.translate import check_model
from server.state import Served, ServerState

router = APIRouter(tags=["tokenizer"])

A = TypeVar("A", CapacityRequest, DetokenizeRequest, TokenizeRequest)


@router.post(
    "/tokenize", response_model=Tokenized, responses=errors(400, 401, 404, 413, 415, 503), **body_of(TokenizeRequest)
)
async def tokenize(request: Request) -> JSONResponse:
    """The token ids of a text, or of a conversation as chat would render it."""
    state = state_of(request)
    served = ready(state)
    body, notes = await body_and_notes(request, TokenizeRequest, state, served)
    ids = await token_ids_of(body, state, served, notes)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [served.tokenizer.token_text(token_id) for token_id in ids]
    return _answer(answer, notes)


@router.post(
    "/detokenize",
    response_model=Detokenized,
    responses=errors(400, 401, 404, 413, 415, 503),
    **body_of(DetokenizeRequest),
)
async def detokenize(request: Request) -> JSONResponse:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    served = ready(state)
    body, notes = await body_and_notes(request, DetokenizeRequest, state, served)
    check_token_ids(body.tokens, "tokens", served.vocab_size)
    text = await asyncio.to_thread(served.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return _answer({"prompt": text}, notes)


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=errors(401, 503))
async def tokenizer_info(request: Request) -> JSONResponse:
    """What a client needs to count tokens as this server does."""
    served = ready(state_of(request))
    tokenizer = served.tokenizer
    return JSONResponse(
        {
            "vocab_size": served.vocab_size,
            "max_model_len": served.max_model_len,
            "bos_token": tokenizer.special_tokens.get("bos_token"),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token": tokenizer.special_tokens.get("eos_token"),
            "eos_token_id": tokenizer.eos_token_id,
            "special_tokens": {
                str(token_id): tokenizer.token_text(token_id) for token_id in sorted(tokenizer.special_ids)
            },
            "stop_token_ids": sorted(served.stop_token_ids),
            "fingerprint": tokenizer.fingerprint,
            "chat_template": served.template.source if served.template else None,
        }
    )


def _answer(answer: dict[str, Any], notes: Notes) -> JSONResponse:
    warnings = {"warnings": notes.warnings} if notes.warnings else {}
    return JSONResponse(answer | warnings, headers=notes.headers())


async def body_and_notes(request: Request, model: type[A], state: ServerState, served: Served) -> tuple[A, Notes]:
    """A request's body, meant for the model that is served, with what was not taken as given.

    Raises:
        ApiError: as `read_body`, or 404 for another model.
        ClientGone: as `read_body`.
    """
    body, notes = await read_body(request, model), Notes(strict=state.config.strict_params)
    notes.unknown(dict(body.unknown_fields()))
    check_model(body.model, served)
    return body, notes


async def token_ids_of(body: PromptFields, state: ServerState, served: Served, notes: Notes) -> list[int]:
    """The ids of a body's text, or of its conversation as chat would render it.

    Raises:
        ApiError, GrammarError, TemplateError: neither or both were given, or they cannot be encoded as asked.
    """
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        prompts = await encode_prompts([body.prompt], served, body.add_special_tokens is not False)
        return list(prompts[0].token_ids)
    check_template_allowed(body, trusted=state.config.trust_request_chat_template)
    tools = wire_tools(body.tools or [])
    await served.tool_check.check(tools)
    view = rendering(body, served, tools, None, notes)
    return (await render_and_encode(view, served, bool(body.add_special_tokens)))[1]
