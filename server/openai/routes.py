"""The two generating routes."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.openai.chat import ChatWire, plan_chat
from server.openai.completions import CompletionWire, plan_completion
from server.openai.openapi import body_of, errors
from server.openai.schema.answers import ChatCompletion, Completion
from server.openai.schema.requests import ChatRequest, CompletionRequest
from server.openai.service import Endpoint, generate

router = APIRouter(tags=["generation"])

CHAT = Endpoint(ChatRequest, plan_chat, ChatWire())
COMPLETIONS = Endpoint(CompletionRequest, plan_completion, CompletionWire())

_STREAM: dict[str, Any] = {
    "description": "The answer; with `stream` as server-sent events that end with `data: [DONE]`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
_RESPONSES = {200: _STREAM, **errors(400, 401, 404, 413, 415, 429, 500, 503, 504)}


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=_RESPONSES, **body_of(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    return await generate(request, CHAT)


@router.post("/v1/completions", response_model=Completion, responses=_RESPONSES, **body_of(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue a text, or several."""
    return await generate(request, COMPLETIONS)
