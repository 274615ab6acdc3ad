"""A long prompt arrives while others are being answered: how much longer do they wait for their next token?

    python -m bench.mixture                                 a server of ours on the embedded model
    python -m bench.mixture --num-in 2000 --streams 8 --serve "--max-num-batched-tokens 256"
    python -m bench.mixture --peer http://127.0.0.1:9000    a running one

Streams begin together; when they are under way the long prompt is sent. Gaps between their tokens that end while it is
being read count as disturbed, all others as idle.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.arrivals import Asker
from bench.client import clock
from bench.figures import Record, percentile
from bench.machine import busy_warning, commit, load_average, processor
from bench.processes import ServerFailed, quire
from bench.report import table
from bench.session import Local
from bench.sse import Exchange
from bench.targets import HttpTarget
from bench.workloads import fixed

BAR = 2.0
STREAM_IN, LONG_OUT = 64, 4
HEAD = ("streams", "long prompt", "its TTFT s", "ITL idle p50 / p99 ms", "disturbed p50 / p99 ms", "p99 ratio", "bar")


@dataclass(frozen=True, slots=True)
class Interrupted:
    """All requests but the last at once, the last one `delay_s` later."""

    delay_s: float

    async def send(self, asker: Asker, requests: Sequence[bytes], rng: random.Random) -> list[Exchange]:
        """Exchanges in the order of the requests."""
        start_s = clock()
        streams = [asyncio.create_task(asker.ask(request, start_s)) for request in requests[:-1]]
        await asyncio.sleep(self.delay_s)
        last = await asker.ask(requests[-1], clock())
        return [*(await asyncio.gather(*streams)), last]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between tokens of the streams, in seconds, and how long the long prompt took."""

    idle_s: tuple[float, ...]
    disturbed_s: tuple[float, ...]
    long_ttft_s: float

    @property
    def ratio(self) -> float:
        """Of the p99: disturbed over idle."""
        return percentile(self.disturbed_s, 0.99) / percentile(self.idle_s, 0.99)


def gaps_of(records: Sequence[Record]) -> Gaps:
    """Sort the streams' gaps by whether they end, or began, while the last record waited for its first content."""
    *streams, long = records
    idle: list[float] = []
    disturbed: list[float] = []
    for record in streams:
        assert record.first_s is not None, "a stream without content"
        ends = itertools.accumulate(record.gaps_s, initial=record.first_s)
        for (began_s, ended_s), gap_s in zip(itertools.pairwise(ends), record.gaps_s, strict=True):
            is_apart = ended_s <= long.due_s or began_s >= long.due_s + long.ttft_s
            (idle if is_apart else disturbed).append(gap_s)
    return Gaps(tuple(idle), tuple(disturbed), long.ttft_s)


def measure(target: HttpTarget, local: Local, args: argparse.Namespace) -> Gaps:
    """One undisturbed run to learn the pace, then `repeats` disturbed ones; all gaps together.

    Raises:
        ServerFailed: a request failed.
    """
    stream, long = fixed(STREAM_IN, args.num_out), fixed(args.num_in, LONG_OUT)
    target.learn_dialect(fixed(32, 8).questions(local.prose, 1, "probe")[0])
    pace = target.run(Interrupted(0.0), stream.questions(local.prose, args.streams + 1, "pace"), "pace")
    delay_s = pace.wall_s / 3
    gaps = []
    for repeat in range(args.repeats):
        asked = stream.questions(local.prose, args.streams, f"{repeat}") + long.questions(local.prose, 1, f"{repeat}")
        records = target.run(Interrupted(delay_s), asked, "mixture").records
        if failed := [record.error for record in records if record.error is not None]:
            raise ServerFailed(f"{len(failed)} requests failed, the first with: {failed[0]}")
        gaps.append(gaps_of(records))
    return Gaps(
        tuple(gap for one in gaps for gap in one.idle_s),
        tuple(gap for one in gaps for gap in one.disturbed_s),
        statistics.median(one.long_ttft_s for one in gaps),
    )


def cells(gaps: Gaps, args: argparse.Namespace) -> list[str]:
    """The table's one row."""
    both = [
        f"{1000 * percentile(some, 0.5):.1f} / {1000 * percentile(some, 0.99):.1f}"
        for some in (gaps.idle_s, gaps.disturbed_s)
    ]
    verdict = f"{BAR:g} x {'met' if gaps.ratio <= BAR else 'missed'}"
    return [str(args.streams), str(args.num_in), f"{gaps.long_ttft_s:.2f}", *both, f"{gaps.ratio:.2f}", verdict]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.mixture", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="of our server")
    parser.add_argument("--peer", metavar="URL", help="measure a running server instead")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--num-in", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--num-out", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    warning = busy_warning(load_average())
    local = Local.of(args.model)
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        try:
            url = args.peer or stack.enter_context(quire(str(local.path), args.serve.split(), log))[0]
            gaps = measure(HttpTarget("server", url.rstrip("/").removesuffix("/v1"), local.decode), local, args)
        except ServerFailed as error:
            sys.stderr.write(f"bench.mixture: {error}\n")
            return 1
    if not gaps.disturbed_s or not gaps.idle_s:
        sys.stderr.write("bench.mixture: the long prompt disturbed none of the gaps, or all: change --num-out\n")
        return 1
    print(f"{processor()}; commit {commit()}; {args.model}; {args.peer or f'quire serve {args.serve}'.strip()}\n")
    print(f"{warning}\n\n{table(HEAD, [cells(gaps, args)])}" if warning else table(HEAD, [cells(gaps, args)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
