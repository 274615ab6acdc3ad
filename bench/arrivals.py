"""When requests are sent: by users who wait for their answers (closed loop), or at random moments (open loop).

Knows prepared requests and a client to send them with; knows nothing of what they ask or of how answers look.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.client import clock
from bench.sse import Exchange


class Asker(Protocol):
    """What sends a request; `bench.client.Client` is one."""

    async def ask(self, request: bytes, due_s: float) -> Exchange:
        """The whole answer."""


@dataclass(frozen=True, slots=True)
class Closed:
    """`num_users` users, each of whom sends the next request as soon as the last is answered."""

    num_users: int

    def __str__(self) -> str:
        return f"{self.num_users} user{'s' if self.num_users != 1 else ''}"

    async def send(self, asker: Asker, requests: Sequence[bytes], rng: random.Random) -> list[Exchange]:
        """Exchanges in the order of the requests."""
        exchanges: list[Exchange | None] = [None] * len(requests)
        waiting = iter(range(len(requests)))
        await asyncio.gather(*(self._user(asker, requests, waiting, exchanges) for _ in range(self.num_users)))
        return [exchange for exchange in exchanges if exchange is not None]

    async def _user(
        self, asker: Asker, requests: Sequence[bytes], waiting: Iterator[int], exchanges: list[Exchange | None]
    ) -> None:
        for number in waiting:
            exchanges[number] = await asker.ask(requests[number], clock())


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests at independent moments, `rate_per_s` of them a second on average, whether earlier ones are done or not.

    A request is due at its moment: what the generator or a full server delays counts into its latency.
    """

    rate_per_s: float

    def __str__(self) -> str:
        return f"Poisson {self.rate_per_s:.3g}/s"

    def moments(self, num: int, rng: random.Random) -> list[float]:
        """Seconds after the start at which each of `num` requests is due; the first at once."""
        moments = [0.0]
        for _ in range(num - 1):
            moments.append(moments[-1] + rng.expovariate(self.rate_per_s))
        return moments[:num]

    async def send(self, asker: Asker, requests: Sequence[bytes], rng: random.Random) -> list[Exchange]:
        """Exchanges in the order of the requests."""
        start_s = clock()
        running = []
        for request, moment_s in zip(requests, self.moments(len(requests), rng), strict=True):
            due_s = start_s + moment_s
            await asyncio.sleep(max(0.0, due_s - clock()))
            running.append(asyncio.create_task(asker.ask(request, due_s)))
        return list(await asyncio.gather(*running))


class Arrival(Protocol):
    """A way for requests to arrive; prints as the table shows it."""

    async def send(self, asker: Asker, requests: Sequence[bytes], rng: random.Random) -> list[Exchange]:
        """Send them all; their exchanges in the same order."""
