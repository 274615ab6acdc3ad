"""Every test of this folder runs twice: with one step in flight, and one step ahead of a late engine."""

from collections.abc import Iterator

import pytest

from tests.scheduler.harness import STEPS_IN_FLIGHT


@pytest.fixture(params=[1, 2], ids=["in step", "one ahead"], autouse=True)
def steps_in_flight(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many steps the scheduler under test has in flight."""
    if request.param > 1 and not request.node.get_closest_marker("asyncio"):
        pytest.skip("runs no scheduler")
    token = STEPS_IN_FLIGHT.set(request.param)
    yield request.param
    STEPS_IN_FLIGHT.reset(token)
