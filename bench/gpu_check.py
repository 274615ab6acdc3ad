"""The GPU path, checked and timed on any CUDA machine in a few minutes: `python bench/gpu_check.py`.

Needs torch, triton, transformers and this repository, nothing else; no model files. It asks, in this order:

    bandwidth       what does a large copy reach? everything memory-bound is put beside it
    kernels         is every Triton kernel right, against float32?
    equality        are the greedy tokens of a small random model transformers' own?
    attention       which share of that bandwidth does decode attention reach?
    steps           how long is a decode step of Llama 3.1 8B's shape at batch 1, with and without CUDA graphs?
    offline         how many tokens per second do 256 requests get on Qwen3 0.6B's shape, here and in transformers?

A short table comes at the end, everything else goes to a file. Every part runs in a process of its own and has a share
of the time (`--seconds`, five minutes at first; what a part does not use goes to those after it): one that crashes,
hangs or takes too long is named in the table, and costs the others nothing. The exit status is 1 when a check failed or
was cut short, 2 when nothing could be checked. `--device cpu --tiny` exercises the script itself; with
TRITON_INTERPRET=1 the kernels too.
"""

import argparse
import importlib.metadata
import importlib.util
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SHARES_S = {"bandwidth": 20, "kernels": 100, "equality": 35, "attention": 35, "steps": 40, "offline": 70}
"""Seconds of each part of a whole run, imports included, in the order in which they run."""

PARTS = tuple(SHARES_S)
USUAL_S = sum(SHARES_S.values())
SWEEP_S = 300
"""What `--sweep` adds for the attention part."""

CHECKING = ("kernels", "equality")
"""Parts that say whether results are right; the others say how fast they come."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, print; returns the exit status."""
    args = parse_args(argv)
    sys.path.insert(0, str(ROOT))  # run as a file, from a checkout that nobody installed
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu_check: no CUDA device here (torch {torch.__version__}); nothing was checked. "
            "`--device cpu --tiny` tries the script itself.",
            file=sys.stderr,
        )
        return 2
    if device.type == "cpu" and not args.tiny:
        print("gpu_check: a CPU can only run the script's tiny form: add --tiny.", file=sys.stderr)
        return 2
    return run(args, torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that any machine runs in seconds")
    parser.add_argument("--only", type=parts, default=PARTS, metavar="A,B", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seconds", type=int, default=USUAL_S, help=f"time for everything ({USUAL_S})")
    parser.add_argument(
        "--sweep", action="store_true", help="try other launch sizes of decode attention (minutes more)"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out of the offline run")
    parser.add_argument("--together", action="store_true", help="all parts in this process, for debugging: no limits")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where everything goes")
    parser.add_argument("--bandwidth", type=float, help=argparse.SUPPRESS)  # this and the next one: a part's process
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def parts(text: str) -> tuple[str, ...]:
    """Names of parts, in the order they run."""
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in names)


def run(args: argparse.Namespace, device: torch.device) -> int:
    """All parts asked for. One that breaks is reported, and the others still run: a rented GPU's time is dear."""
    from bench.gpu import isolation, report

    if args.findings is not None:
        [name] = args.only
        isolation.write_lines(until_it_breaks(name, runners_of(args, device)[name]), args.findings)
        return 0
    began = time.perf_counter()
    findings: list[report.Finding] = []
    for name, deadline_s in deadlines_of(args).items():
        seconds = time.perf_counter() - began
        print(f"[{seconds:5.1f} s] {name}", file=sys.stderr, flush=True)
        if args.together:
            findings += until_it_breaks(name, runners_of(args, device)[name])
        else:
            limit_s, must_end = deadline_s - seconds, name in CHECKING
            findings += isolation.run_apart(name, command_of(args, name), limit_s, must_end=must_end)
        if name == "bandwidth":
            args.bandwidth = next((f.details["bytes_per_s"] for f in findings if "bytes_per_s" in f.details), math.nan)
        head = {**describe(device), "seconds": time.perf_counter() - began, "command": sys.argv[1:]}
        report.write(args.out, head, findings)
    print(", ".join(f"{key} {value}" for key, value in describe(device).items()) + f"; {head['seconds']:.0f} s\n")
    print(report.table(findings))
    return int(any(finding.verdict == "FAIL" for finding in findings))


def deadlines_of(args: argparse.Namespace) -> dict[str, float]:
    """Parts to run, the bandwidth always, and the seconds after the start at which each must have ended."""
    shares_s = {name: SHARES_S[name] for name in PARTS if name in ("bandwidth", *args.only)}
    scale = args.seconds / sum(shares_s.values())
    shares_s = {name: share_s * scale for name, share_s in shares_s.items()}
    if args.sweep and "attention" in shares_s:
        shares_s["attention"] += SWEEP_S
    return dict(zip(shares_s, accumulate(shares_s.values()), strict=True))


def command_of(args: argparse.Namespace, name: str) -> list[str]:
    """What runs one part in a process of its own, but for the file of its findings."""
    switches = [f"--{name.replace('_', '-')}" for name in ("tiny", "sweep", "no_peer") if getattr(args, name)]
    command = [sys.executable, str(Path(__file__).resolve()), "--device", args.device, *switches, "--only", name]
    return [*command, "--bandwidth", str(args.bandwidth or math.nan), "--findings"]


def runners_of(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], Iterable]]:
    """Name of a part -> what yields its findings. Imports happen inside, so that one part's need is not another's."""

    def bandwidth() -> Iterable:
        from bench.gpu.clock import copy_bandwidth
        from bench.gpu.report import Finding

        rate = copy_bandwidth(device, (16 << 20) if args.tiny else (2 << 30))  # more than a cache holds
        value = f"{rate / 1e9:.0f} GB/s read + written"
        return [Finding("bandwidth", "device-to-device copy", value, details={"bytes_per_s": rate})]

    def kernels() -> Iterable:
        reason = why_no_kernels(device)
        if reason is not None:
            from bench.gpu.report import skipped

            return [skipped("kernels", "all", reason)]
        from bench.gpu import kernels

        wide = [torch.bfloat16, torch.float16, torch.float32]
        return kernels.findings(device, [torch.float32] if device.type == "cpu" else wide, args.tiny)

    def equality() -> Iterable:
        from bench.gpu import serving

        return serving.equality(device)

    def attention() -> Iterable:
        from bench.gpu import attention

        return attention.findings(device, args.bandwidth, args.tiny, args.sweep)

    def steps() -> Iterable:
        from bench.gpu import serving

        return serving.steps(device, args.bandwidth, args.tiny)

    def offline() -> Iterable:
        from bench.gpu import serving

        return serving.offline(device, args.tiny, not args.no_peer)

    runners = (bandwidth, kernels, equality, attention, steps, offline)
    return {runner.__name__: runner for runner in runners}


def why_no_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run here, if they cannot."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "a CPU needs TRITON_INTERPRET=1"
    return None


def until_it_breaks(name: str, runner: Callable[[], Iterable]) -> Iterator:
    """A part's findings; an exception becomes a failed one."""
    from bench.gpu.report import Finding

    try:
        yield from runner()
    except Exception as error:  # noqa: BLE001 - see `run`
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        yield Finding(name, "broke off", f"{type(error).__name__}: {error}"[:100], "FAIL", {"traceback": trace})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, str]:
    """The machine and the versions."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if has_triton else "none",
        "transformers": importlib.metadata.version("transformers"),
        "commit": commit(),
    }


def commit() -> str:
    """Of this checkout, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
