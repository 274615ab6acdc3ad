"""Routes for machines that watch the server: alive, ready, metrics, version.

Knows the phases of a server's life and what a stuck or dead engine looks like. Asks for no API key and touches no
request. Alive means "restarting would not help"; ready means "a request sent now would be served".
"""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from scheduler.stats import SchedulerStats
from server.errors import Busy
from server.state import Phase, ServerState

STUCK_AFTER_S = 120.0
"""A step that runs longer than this means that the engine hangs (the slowest honest steps take some seconds)."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request sent now would be served; if not, why (`code`, `reason`) and when to ask again."""

    ready: bool
    code: str
    reason: str
    retry_after_s: float | None = None


def readiness(state: ServerState, stuck_after_s: float = STUCK_AFTER_S) -> Readiness:
    """Judge a server by its phase, and while it is ready by its engine."""
    if state.phase in (Phase.STARTING, Phase.LOADING):
        share = f" ({state.phase_fraction:.0%})" if state.phase_fraction else ""
        return Readiness(False, "loading", f"{state.phase_detail or 'starting'}{share}", retry_after_s=2)
    if state.phase is Phase.DRAINING:
        return Readiness(False, "draining", "shutting down; running requests are being finished")
    if state.phase is Phase.FAILED:
        return Readiness(False, "engine_dead", state.phase_detail)
    assert state.served is not None, "ready without a model"
    return _engine_readiness(state.served.scheduler.stats(), stuck_after_s)


def _engine_readiness(stats: SchedulerStats, stuck_after_s: float) -> Readiness:
    if stats.unhealthy is not None:
        return Readiness(False, "engine_dead", stats.unhealthy)
    if stats.is_draining:
        return Readiness(False, "draining", "shutting down; running requests are being finished")
    if stats.step_running_s is not None and stats.step_running_s > stuck_after_s:
        return Readiness(False, "engine_stuck", f"one step has been running for {stats.step_running_s:.0f} s")
    return Readiness(True, "ready", "")


def health_router(state: ServerState, version: str) -> APIRouter:
    """`/health`, `/ready`, `/metrics`, `/version` and their aliases."""
    router = APIRouter(tags=["operations"])

    async def alive() -> Response:
        """Whether this process should live on."""
        verdict = readiness(state)
        if verdict.code == "engine_dead":
            return _refusal(state, verdict)
        return JSONResponse({"status": "alive", "phase": state.phase.value, "uptime_s": round(state.uptime_s, 3)})

    async def ready() -> Response:
        """Whether a request sent now would be served, and why not."""
        verdict = readiness(state)
        if not verdict.ready:
            return _refusal(state, verdict)
        assert state.served is not None, "ready without a model"
        return JSONResponse({"status": "ready", "phase": state.phase.value, "model": state.served.model_name})

    async def metrics() -> Response:
        """Everything in Prometheus' text format."""
        content, content_type = state.metrics.render()
        return Response(content, headers={"content-type": content_type})

    async def tell_version() -> Response:
        """The version of this software."""
        return JSONResponse({"version": version})

    refusals: dict[int | str, dict[str, Any]] = {503: {"description": "No, and why not."}}
    for path in ("/health", "/healthz", "/health/live"):
        router.add_api_route(path, alive, methods=["GET"], responses=refusals)
    for path in ("/ready", "/health/ready"):
        router.add_api_route(path, ready, methods=["GET"], responses=refusals)
    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
    router.add_api_route("/version", tell_version, methods=["GET"])
    return router


def _refusal(state: ServerState, verdict: Readiness) -> Response:
    wait_s = verdict.retry_after_s
    busy = None if wait_s is None else Busy(verdict.code, 0, 0, wait_s)
    body: dict[str, Any] = {
        "status": verdict.code,
        "phase": state.phase.value,
        "reason": verdict.reason,
        "detail": state.phase_detail,
        "fraction": round(state.phase_fraction, 3),
        "error": {
            "message": f"Not ready: {verdict.reason}.",
            "type": "server_error",
            "param": None,
            "code": verdict.code,
            **(busy.fields() if busy else {}),
        },
    }
    return JSONResponse(body, status_code=503, headers=busy.headers() if busy else None)
