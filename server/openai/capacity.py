"""`POST /v1/capacity`: would this request be taken now, when would it begin, give its first token and end?

Asks the scheduler for a picture of the moment and plays it forward in a thread; queues nothing.
"""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from engine.sampling.params import SamplingParams
from kvpool.prefix import namespace_root
from scheduler.errors import ContextTooLong, RequestRefused
from scheduler.outlook import Question
from scheduler.predict import predict
from scheduler.request import Request
from server.errors import as_api_error, bad_request
from server.openai.notes import Notes
from server.openai.openapi import body_of, errors
from server.openai.schema.answers import CapacityAnswer
from server.openai.schema.requests import CapacityRequest
from server.openai.service import ready, state_of
from server.openai.tokens import body_and_notes, token_ids_of
from server.state import Served, ServerState
from server.text.replies import spell

router = APIRouter(tags=["kv"])


@router.post(
    "/v1/capacity",
    response_model=CapacityAnswer,
    responses=errors(400, 401, 404, 413, 415, 503),
    **body_of(CapacityRequest),
)
async def capacity(request: HTTPRequest) -> JSONResponse:
    """What would become of a request that came now. Nothing is queued."""
    state = state_of(request)
    served = ready(state)
    body, notes = await body_and_notes(request, CapacityRequest, state, served)
    asked = await _asked(body, state, served, notes)
    num_prompt = body.prompt_tokens or len(asked.prompt_ids)
    try:
        if num_prompt > served.max_model_len:
            raise ContextTooLong(num_prompt, asked.max_tokens, served.max_model_len)
        question = served.scheduler.foresee(asked)
    except RequestRefused as error:
        foreseen: dict[str, Any] = _refused(error)
    else:
        foreseen = await _foreseen(question)
    head = {"object": "capacity", "prompt_tokens": num_prompt, "max_tokens": asked.max_tokens}
    return JSONResponse({**head, **foreseen, "load": _load(served)}, headers=notes.headers())


async def _asked(body: CapacityRequest, state: ServerState, served: Served, notes: Notes) -> Request:
    """The request as it would be queued. Of a prompt that is only a number nothing can be cached."""
    namespace = namespace_root(*served.namespace, body.cache_salt or "")
    if body.prompt_tokens is None:
        prompt_ids = tuple(await token_ids_of(body, state, served, notes))
        if served.replies is not None:
            prompt_ids = served.replies.recall(spell(served.tokenizer, namespace, prompt_ids)).token_ids
    elif body.prompt is not None or body.messages is not None:
        raise bad_request("Give one of prompt, messages and prompt_tokens.", "prompt_tokens")
    else:
        prompt_ids = (0,) * min(body.prompt_tokens, served.max_model_len + 1)  # what is longer is refused by its number
    if not prompt_ids:
        raise bad_request("The prompt has no tokens; there is nothing to continue.", "prompt")
    return Request(
        request_id="capacity",
        prompt_ids=prompt_ids,
        sampling=SamplingParams(),
        max_tokens=body.max_tokens,
        cache_namespace=namespace,
        use_prefix_cache=body.prompt_tokens is None,
    )


def _refused(error: RequestRefused) -> dict[str, Any]:
    return {
        "cached_tokens": 0,
        "accepted": False,
        "refusal": as_api_error(error).body()["error"],
        "fits_now": False,
        "predicted": None,
        "concurrent": None,
    }


async def _foreseen(question: Question) -> dict[str, Any]:
    predicted = await asyncio.to_thread(predict, question.outlook, question.load)
    times = ("queue_wait_s", "ttft_s", "finish_s")
    return {
        "cached_tokens": question.num_cached_tokens,
        "accepted": True,
        "refusal": None,
        "fits_now": question.outlook.fits_now(question.load),
        "predicted": None if predicted is None else {name: round(getattr(predicted, name), 4) for name in times},
        "concurrent": question.num_concurrent,
    }


def _load(served: Served) -> dict[str, int]:
    stats, block_size = served.scheduler.stats(), served.kv_layout.block_size
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_tokens": stats.pool.num_blocks * block_size,
        "kv_tokens_used": stats.pool.num_referenced * block_size,
    }
