"""The OpenAPI document: routes read their bodies themselves, so their schemas are put in by hand, here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.openai.schema.answers import ErrorBody
from server.openai.schema.requests import (
    CapacityRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    CapacityRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_REASONS = {
    400: "A field is wrong, or the prompt does not fit.",
    401: "Missing or wrong API key.",
    404: "Unknown model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full, or the key's limit is reached; see Retry-After.",
    500: "A fault of the server.",
    503: "Loading, shutting down, or the engine is dead.",
    504: "The request's own deadline passed before the first token.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer with these errors."""
    return {status: {"model": ErrorBody, "description": _REASONS[status]} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Route arguments that declare a JSON body of this model."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()` know the bodies."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            _, schemas = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
