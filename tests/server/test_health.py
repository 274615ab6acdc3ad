from importlib.metadata import version
from types import SimpleNamespace

import httpx
import pytest

from kvpool.pool import PoolStats
from scheduler.stats import SchedulerStats
from server.app import create_app
from server.config import ServerConfig
from server.health import STUCK_AFTER_S
from server.limits import KeyRing
from server.metrics import Metrics
from server.state import ServerState


class FakeScheduler:
    def __init__(self):
        self.step_running_s, self.is_draining, self.unhealthy = None, False, None

    def stats(self):
        pool = PoolStats(10, 10, 0, 0, 0)
        return SchedulerStats(0, 0, 0, 0.0, self.step_running_s, self.is_draining, self.unhealthy, pool)


@pytest.fixture
def scheduler():
    return FakeScheduler()


@pytest.fixture
def served(scheduler):
    return SimpleNamespace(scheduler=scheduler, model_name="tiny")


@pytest.fixture
def state():
    return ServerState(ServerConfig(), Metrics(version="1.2.3"), KeyRing())


@pytest.fixture
def get(state):
    app = create_app(state)

    async def call(path, method="GET"):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
            return await client.request(method, path)

    return call


ALIVE, READY = ("/health", "/healthz", "/health/live"), ("/ready", "/health/ready")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_every_route_answers(state, served, get, method):
    state.set_ready(served)
    for path in (*ALIVE, *READY, "/metrics", "/version"):
        answer = await get(path, method)
        assert answer.status_code == 200, path


async def test_while_loading_the_process_is_alive_and_says_what_it_does(state, get):
    state.set_loading("reading weights", 0.25)
    for path in ALIVE:
        assert (await get(path)).status_code == 200
    for path in READY:
        answer = await get(path)
        assert answer.status_code == 503
        body = answer.json()
        assert (body["status"], body["phase"], body["detail"], body["fraction"]) == (
            "loading",
            "loading",
            "reading weights",
            0.25,
        )
        assert body["error"]["code"] == "loading"
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1000
        assert {"reason", "queue_depth", "limit", "retry_after_s"} <= set(body["error"])


async def test_ready_names_the_model(state, served, get):
    state.set_ready(served)
    assert (await get("/ready")).json() == {"status": "ready", "phase": "ready", "model": "tiny"}


async def test_draining_is_alive_and_not_ready(state, served, get):
    state.set_ready(served)
    state.set_draining()
    answer = await get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    assert (await get("/health")).status_code == 200


async def test_a_dead_engine_turns_everything_red(state, served, scheduler, get):
    state.set_ready(served)
    scheduler.unhealthy = "three steps failed"
    for path in (*ALIVE, *READY):
        answer = await get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "engine_dead")
        assert "three steps failed" in answer.json()["reason"]


async def test_a_failed_server_says_why(state, get):
    state.set_failed("no such file")
    answer = await get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no such file")
    assert (await get("/health")).status_code == 503


async def test_a_step_that_hangs_is_not_ready_and_a_slow_one_is(state, served, scheduler, get):
    state.set_ready(served)
    scheduler.step_running_s = STUCK_AFTER_S / 2
    assert (await get("/ready")).status_code == 200
    scheduler.step_running_s = STUCK_AFTER_S + 1
    answer = await get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "engine_stuck")
    assert (await get("/health")).status_code == 200


async def test_metrics_and_version(get):
    answer = await get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text.endswith("\n")
    assert (await get("/version")).json() == {"version": version("quire")}
