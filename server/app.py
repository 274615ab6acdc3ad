"""The FastAPI application: routes, errors and middleware put together. Loads nothing and starts nothing by itself."""

from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware

from server.docs_page import router as docs_router
from server.errors import install_handlers, on_error
from server.health import health_router
from server.middleware import CLIENT_CLOSED, Accounting, ApiKey, BodyLimit, HeadAsGet
from server.openai.body import ClientGone
from server.openai.capacity import router as capacity_router
from server.openai.kv import router as kv_router
from server.openai.models import router as models_router
from server.openai.openapi import install_openapi
from server.openai.routes import router as generation_router
from server.openai.settings import SeedSource
from server.openai.tokens import router as tokens_router
from server.state import ServerState

DESCRIPTION = "Language models over the OpenAI HTTP API: continuous batching over a paged KV pool."
EXPOSED_HEADERS = (
    "x-request-id",
    "x-ignored-params",
    "server-timing",
    "retry-after",
    "retry-after-ms",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)


def create_app(state: ServerState) -> FastAPI:
    """The application over `state`. Whoever starts the server also loads the model and drives `state`."""
    app = FastAPI(
        title="Quire",
        version=version("quire"),
        description=DESCRIPTION,
        middleware=_middleware(state),
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load their scripts from other hosts: see `server.docs_page`
        redoc_url=None,
    )
    app.state.quire = state
    app.state.seeds = SeedSource(state.config.seed)
    install_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    for router in (
        generation_router,
        models_router,
        tokens_router,
        kv_router,
        capacity_router,
        docs_router,
        health_router(state, app.version),
    ):
        app.include_router(router)
    install_openapi(app)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the log and the metrics do."""
    return Response(status_code=CLIENT_CLOSED)


def _middleware(state: ServerState) -> list[Middleware]:
    """From the outside in."""
    around = [Middleware(HeadAsGet), Middleware(Accounting, state=state)]
    if state.config.allowed_origins:
        around.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(state.config.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=list(EXPOSED_HEADERS),
            )
        )
    return [
        *around,
        # Inside the others, so that an answer to a fault of ours has their headers too.
        Middleware(ServerErrorMiddleware, handler=on_error),
        Middleware(BodyLimit, max_bytes=state.config.max_request_bytes),
        Middleware(ApiKey, state=state),
    ]
