"""From an HTTP request to its answer, the same for each endpoint: readiness, limits, translation, queueing."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic

from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError, Busy
from server.limits import Lease
from server.middleware import RequestContext
from server.openai.answer import respond
from server.openai.body import W, read_body
from server.openai.generation import Generation
from server.openai.plan import Plan
from server.openai.settings import SeedSource
from server.openai.translate import Arrival, Target
from server.openai.wire import WireForm
from server.state import Phase, Served, ServerState


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[W]):
    """One generating endpoint: its body, how it is translated, and how it writes its answer."""

    schema: type[W]
    plan: Callable[[W, Arrival, Target], Awaitable[Plan]]
    form: WireForm


def state_of(request: Request) -> ServerState:
    """The server's state."""
    state: ServerState = request.app.state.quire
    return state


def ready(state: ServerState) -> Served:
    """The served model. Raises ApiError (503) while there is none, or none any more."""
    if state.phase is Phase.READY and state.served is not None:
        return state.served
    if state.phase is Phase.DRAINING:
        raise ApiError(503, "The server is shutting down.", code="draining", busy=_drain_time(state))
    if state.phase is Phase.FAILED:
        raise ApiError(503, f"The engine is not running: {state.phase_detail}", code="engine_dead")
    left = state.uptime_s * (1 - state.phase_fraction) / state.phase_fraction if state.phase_fraction else 5.0
    message = f"The model is being loaded ({state.phase_detail or state.phase.value})."
    raise ApiError(503, message, code="loading", busy=Busy("loading", 0, 0, left))


def _drain_time(state: ServerState) -> Busy:
    """How long what is accepted will take, by the measured rate."""
    if state.served is None:
        return Busy("draining", 0, 0, 1.0)
    stats = state.served.scheduler.stats()
    wait_s = stats.num_waiting_tokens / stats.drain_tokens_per_s if stats.drain_tokens_per_s else 1.0
    return Busy("draining", stats.num_waiting, 0, wait_s)


async def generate(request: Request, endpoint: Endpoint[W]) -> Response:
    """Answer a chat or completion request.

    Raises:
        Whatever `server.errors.TABLE` knows, and ClientGone, before the first byte is sent.
    """
    state = state_of(request)
    context: RequestContext = request.scope["quire"]
    served = ready(state)
    with ExitStack() as undo:
        lease = context.account.admit()
        undo.callback(lease.close)
        arrival = Arrival.of(context.request_id, request.headers, served.clock.now())
        body = await read_body(request, endpoint.schema)
        target = Target(served, state.config, seeds_of(request))
        plan = await endpoint.plan(body, arrival, target)
        lease.charge_prompt(plan.num_prompt_tokens)
        generation = Generation(plan, endpoint.form, served, _settle(state, context, lease))
        undo.pop_all()
    context.headers.update({**plan.headers, **context.account.headers()})
    return await respond(request, generation, served, state.config)


def seeds_of(request: Request) -> SeedSource:
    """Where seeds of requests without one come from."""
    seeds: SeedSource = request.app.state.seeds
    return seeds


def _settle(state: ServerState, context: RequestContext, lease: Lease) -> Callable[[Generation], None]:
    """What is done once when a generation ends: close the books of the key, the counters and the metrics."""

    def settle(generation: Generation) -> None:
        num_output = generation.num_output_tokens
        lease.close(num_output)
        context.finish_reason = generation.finish_reason
        state.metrics.tokens_used(context.account.name, generation.plan.num_prompt_tokens, num_output)

    return settle
