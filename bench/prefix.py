"""What sharing prefixes gains, and what looking for them costs: three questions, each with its bar.

    python -m bench.prefix                                  all three, on the embedded model
    python -m bench.prefix --only cost --pairs 100          one of them: warm, cost or users

warm     a prompt whose long beginning was seen: its TTFT, and that of a prompt never seen, in turn, over HTTP
cost     the same requests, none of which shares anything, with the cache and without, in turn, without HTTP: see
         `bench.prefix_cost`
users    many users at once behind one new system prompt, over HTTP: the blocks that the server says they hold
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.arrivals import Asker, Closed
from bench.client import clock
from bench.figures import Record
from bench.machine import busy_warning, commit, load_average, processor
from bench.processes import ServerFailed, get, quire
from bench.report import table
from bench.session import Local
from bench.sse import Exchange
from bench.targets import HttpTarget
from bench.workloads import Prose, Question, fixed
from kvpool.table import blocks_for
from server.openmp import tame_thread_barriers

WARM_BAR = 0.2
BLOCK_SIZE = 16
NUM_TAIL = 32
"""Own tokens behind a long beginning, where one prompt follows another."""

USER_TAIL, USER_OUT = 4, 24
"""Of each user: so little that two copies of the system prompt would be more than all that users hold of their own."""

WARM_HEAD = ("beginning", "repeats", "TTFT cold s", "TTFT warm s", "warm / cold", "bar")
USERS_HEAD = ("users", "system prompt", "held by", "blocks held", "a copy each", "bar")


# ------------------------------------------------------------------------------------------------------------- warm


@dataclass(frozen=True, slots=True)
class Warmth:
    """TTFTs in seconds, one pair a repeat."""

    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.warm_s) / statistics.median(self.cold_s)


def measure_warm(target: HttpTarget, prose: Prose, num_shared: int, repeats: int) -> Warmth:
    """A new beginning each time, asked twice with other ends. Raises ServerFailed."""
    pairs = []
    for repeat in range(repeats):
        rng = random.Random(f"warm/{repeat}")
        shared = prose.passage(num_shared, rng)
        pairs.append([_ask(target, Question(shared + prose.passage(NUM_TAIL, rng), 4)) for _ in range(2)])
        cold, warm = pairs[-1]
        if cold.num_cached_tokens > BLOCK_SIZE or warm.num_cached_tokens < num_shared - BLOCK_SIZE:
            raise ServerFailed(f"found {cold.num_cached_tokens} tokens cold and {warm.num_cached_tokens} warm")
    return Warmth(tuple(cold.ttft_s for cold, _ in pairs), tuple(warm.ttft_s for _, warm in pairs))


def _ask(target: HttpTarget, question: Question) -> Record:
    [record] = _checked(target.run(Closed(1), [question], "warm").records)
    return record


def _checked(records: Sequence[Record]) -> Sequence[Record]:
    """Raises ServerFailed where one of them has an error."""
    if failed := [record.error for record in records if record.error is not None]:
        raise ServerFailed(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return records


def warm_cells(warmth: Warmth, num_shared: int) -> list[str]:
    """The table's row."""
    medians = [f"{statistics.median(times_s):.3f}" for times_s in (warmth.cold_s, warmth.warm_s)]
    verdict = f"{WARM_BAR:g} {'met' if warmth.ratio <= WARM_BAR else 'missed'}"
    return [f"{num_shared:,} tokens", str(len(warmth.cold_s)), *medians, f"{warmth.ratio:.3f}", verdict]


# ------------------------------------------------------------------------------------------------------------ users


@dataclass(slots=True)
class Watched:
    """All requests at once, while the KV pool is looked at again and again."""

    url: str
    states: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, asker: Asker, requests: Sequence[bytes], rng: random.Random) -> list[Exchange]:
        """Exchanges in the order of the requests."""
        asking = [asyncio.create_task(asker.ask(request, clock())) for request in requests]
        while not all(task.done() for task in asking):
            body = await asyncio.to_thread(get, f"{self.url}/v1/kv")
            if body is not None:
                self.states.append(json.loads(body))
            await asyncio.sleep(0.005)
        return list(await asyncio.gather(*asking))


@dataclass(frozen=True, slots=True)
class Holding:
    """When most users ran: how many held the whole system prompt, and all blocks that anybody held."""

    num_holders: int
    num_blocks: int


def holding_of(states: Sequence[dict[str, Any]], num_shared_blocks: int) -> Holding:
    """The fullest of the states that `GET /v1/kv` gave. Raises ServerFailed when nobody was seen."""

    def holders(state: dict[str, Any]) -> int:
        prefixes = [each for each in state["top_prefixes"] if each["blocks"] == num_shared_blocks]
        return max((each["holders"] for each in prefixes), default=0)

    seen = [Holding(holders(state), state["blocks"]["referenced"]) for state in states]
    fullest = max(seen, key=lambda each: (each.num_holders, each.num_blocks), default=Holding(0, 0))
    if not fullest.num_holders:
        raise ServerFailed("the users were gone before anybody looked")
    return fullest


def measure_users(target: HttpTarget, prose: Prose, num_users: int, num_shared: int) -> Holding:
    """All users at once, behind a beginning that nobody has seen. Raises ServerFailed."""
    rng = random.Random("users")
    shared = prose.passage(num_shared, rng)
    questions = [Question(shared + prose.passage(USER_TAIL, rng), USER_OUT) for _ in range(num_users)]
    watched = Watched(target.url)
    _checked(target.run(watched, questions, "users").records)
    return holding_of(watched.states, num_shared // BLOCK_SIZE)


def users_cells(holding: Holding, num_users: int, num_shared: int) -> list[str]:
    """The table's row. One copy: what is held beyond it, users may hold of their own."""
    num_shared_blocks = num_shared // BLOCK_SIZE
    own = blocks_for(USER_TAIL + USER_OUT, BLOCK_SIZE)
    is_one = holding.num_holders == num_users and holding.num_blocks <= num_shared_blocks + num_users * own
    return [
        str(num_users),
        f"{num_shared_blocks} blocks",
        f"{holding.num_holders} users",
        str(holding.num_blocks),
        str(num_users * (num_shared_blocks + own)),
        f"one copy: {'met' if is_one else 'missed'}",
    ]


# ------------------------------------------------------------------------------------------------------------- all


def tables(args: argparse.Namespace) -> Iterator[str]:
    """One after the other, as they are measured. Raises ServerFailed."""
    local = Local.of(args.model)
    if args.only in (None, "warm", "users"):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            flags = ["--max-num-seqs", str(max(args.users, 8)), *args.serve.split()]
            url, _ = stack.enter_context(quire(str(local.path), flags, Path(folder) / "server.log"))
            target = HttpTarget("server", url, local.decode)
            target.learn_dialect(fixed(32, 8).questions(local.prose, 1, "probe")[0])
            if args.only != "users":
                warmth = measure_warm(target, local.prose, args.shared, args.repeats)
                yield table(WARM_HEAD, [warm_cells(warmth, args.shared)])
            if args.only != "warm":
                holding = measure_users(target, local.prose, args.users, args.system)
                yield table(USERS_HEAD, [users_cells(holding, args.users, args.system)])
    if args.only in (None, "cost"):
        from bench import prefix_cost  # imports torch, whose threads are tame by now

        questions = prefix_cost.Questions(local.prose, args.at_once, args.num_in, args.num_out)
        yield table(prefix_cost.HEAD, prefix_cost.rows(str(local.path), questions, args.pairs))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="of our server")
    parser.add_argument("--only", choices=("warm", "cost", "users"))
    parser.add_argument("--shared", type=int, default=2000, help="warm: tokens of the beginning")
    parser.add_argument("--repeats", type=int, default=5, help="warm: new beginnings")
    parser.add_argument("--pairs", type=int, default=60, help="cost: rounds with the cache and without")
    parser.add_argument("--at-once", type=int, default=8, help="cost: requests of a round")
    parser.add_argument("--num-in", type=int, default=64, help="cost: tokens of a prompt")
    parser.add_argument("--num-out", type=int, default=16, help="cost: tokens of an answer")
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--system", type=int, default=1024, help="users: tokens of the system prompt, whole blocks")
    args = parser.parse_args(argv)
    warning = busy_warning(load_average())
    tame_thread_barriers(os.environ)
    print(f"{processor()}; commit {commit()}; {args.model}; {f'quire serve {args.serve}'.strip()}\n")
    if warning:
        print(f"{warning}\n")
    try:
        for each in tables(args):
            print(each, end="\n\n", flush=True)
    except ServerFailed as error:
        sys.stderr.write(f"bench.prefix: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
