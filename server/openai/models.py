"""`GET /v1/models` and `GET /v1/models/{id}`. Every name of the served model is listed."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from server.openai.openapi import errors
from server.openai.schema.answers import ModelCard, ModelList
from server.openai.service import ready, state_of
from server.openai.translate import model_not_found
from server.state import Served

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=ModelList, responses=errors(401, 503))
async def list_models(request: Request) -> JSONResponse:
    """The served models."""
    served = ready(state_of(request))
    return JSONResponse({"object": "list", "data": [model_card(name, served) for name in served.model_names]})


@router.get("/v1/models/{model_id:path}", response_model=ModelCard, responses=errors(401, 404, 503))
async def get_model(request: Request, model_id: str) -> JSONResponse:
    """One model; ids may hold slashes."""
    served = ready(state_of(request))
    if model_id not in served.model_names:
        raise model_not_found(model_id)
    return JSONResponse(model_card(model_id, served))


def model_card(name: str, served: Served) -> dict[str, Any]:
    """A model as the listing shows it."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "quire",
        "root": served.model_name,
        "parent": None,
        "max_model_len": served.max_model_len,
    }
