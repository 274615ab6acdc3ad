"""`python -m bench.startup`: from the start of a server's process to its first answer, and where the time goes.

    python -m bench.startup                            the embedded model
    python -m bench.startup --serve "--dtype bfloat16" --repeats 10

Each repeat starts `quire serve` anew and reads its log. The first start is not counted: after it files are in the page
cache, native code is compiled and modules have their bytecode. Phases follow one another; "imports, HTTP" is everything
before the port answers. Processor time, of all threads until ready, says what a busy machine's clock does not.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from bench.machine import busy_warning, commit, load_average, processor
from bench.processes import ServerFailed, cpu_seconds, free_port, post, running, wait_until_ready
from bench.report import table

BAR_S = 5.0
FIRST, LAST, READY, CPU, ANSWER = "imports, HTTP", "assembling", "ready", "processor time", "first answer"


def phases_of(log: str) -> dict[str, float]:
    """Seconds of every loading phase that a JSON log names, in order, and from "listening" to "ready"."""
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        record = json.loads(line)
        if record["logger"] == "quire.load":
            phase, _, duration = record["message"].rpartition(": ")
            seconds[phase] = seconds.get(phase, 0.0) + float(duration.removesuffix(" s"))
    return seconds


def start_once(flags: Sequence[str], log: Path) -> dict[str, float]:
    """One start: seconds by phase, then the sums.

    Raises:
        ServerFailed: it did not start, or did not answer.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--log-format", "json", *flags]
    began_s = time.perf_counter()
    with running(command, log) as process:
        listening_s = _until_listening(process, log) - began_s
        wait_until_ready(process, f"{url}/ready", log, 300.0)
        ready_s, cpu_s = time.perf_counter() - began_s, cpu_seconds(process.pid)
        post(f"{url}/v1/completions", {"prompt": "A", "max_tokens": 1})
        answer_s = time.perf_counter() - began_s
    phases = phases_of(log.read_text())
    rest_s = max(0.0, ready_s - listening_s - sum(phases.values()))
    return {FIRST: listening_s, **phases, LAST: rest_s, READY: ready_s, CPU: cpu_s, ANSWER: answer_s}


def _until_listening(process: subprocess.Popen[bytes], log: Path) -> float:
    while "listening on" not in log.read_text():
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with status {process.returncode}")
        time.sleep(0.005)
    return time.perf_counter()


def report(starts: Sequence[Mapping[str, float]]) -> str:
    """The table: median, least and greatest seconds of each phase."""
    rows = []
    for phase in dict.fromkeys(phase for start in starts for phase in start):
        seconds = [start.get(phase, 0.0) for start in starts]
        rows.append([phase, *(f"{f(seconds):.2f}" for f in (statistics.median, min, max))])
    ready_s = statistics.median(start[READY] for start in starts)
    verdict = f"Bar: ready after {BAR_S:g} s: {'met' if ready_s <= BAR_S else 'missed'}."
    return f"{table(['phase', 'median s', 'least', 'greatest'], rows)}\n\n{verdict}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--serve", default="", metavar="FLAGS", help="of the server")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    warning = busy_warning(load_average())
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            start_once(args.serve.split(), log)
            starts = [start_once(args.serve.split(), log) for _ in tqdm(range(args.repeats), unit="start")]
        except ServerFailed as error:
            sys.stderr.write(f"bench.startup: {error}\n")
            return 1
    print(f"{processor()}; commit {commit()}; quire serve {args.serve}\n")
    print("\n\n".join([*([warning] if warning else []), report(starts)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
