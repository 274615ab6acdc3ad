"""The GPU path, checked and timed on any CUDA machine in a few minutes: `python bench/gpu_check.py`.

Needs torch, triton, transformers and this repository, nothing else; no model files. It asks, in this order:

    bandwidth       what does a large copy reach? everything memory-bound is put beside it
    kernels         is every Triton kernel right, against float32?
    equality        are the greedy tokens of a small random model transformers' own?
    attention       which share of that bandwidth does decode attention reach?
    steps           how long is a decode step of Llama 3.1 8B's shape at batch 1, with and without CUDA graphs?
    offline         how many tokens per second do 256 requests get on Qwen3 0.6B's shape, here and in transformers?

A short table comes at the end, everything else goes to a file. The exit status is 1 when a check failed, 2 when nothing
could be checked. `--device cpu --tiny` exercises the script itself; with TRITON_INTERPRET=1 the kernels too.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("bandwidth", "kernels", "equality", "attention", "steps", "offline")


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
    parser.add_argument("--sweep", action="store_true", help="try other launch sizes of decode attention (minutes)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out of the offline run")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where everything goes")
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
    from bench.gpu import report

    began = time.perf_counter()
    bandwidth = measure_bandwidth(device, args.tiny)
    runners = runners_of(args, device, bandwidth)
    findings = [report.Finding("bandwidth", "device-to-device copy", f"{bandwidth / 1e9:.0f} GB/s read + written")]
    for name in args.only:
        print(f"[{time.perf_counter() - began:5.1f} s] {name}", file=sys.stderr, flush=True)
        findings += until_it_breaks(name, runners[name]) if name in runners else []
    seconds = time.perf_counter() - began
    head = {**describe(device), "seconds": seconds, "command": sys.argv[1:]}
    report.write(args.out, head, findings)
    print(", ".join(f"{key} {value}" for key, value in describe(device).items()) + f"; {seconds:.0f} s\n")
    print(report.table(findings))
    return int(any(finding.verdict == "FAIL" for finding in findings))


def measure_bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes per second of a copy that no cache can hold."""
    from bench.gpu.clock import copy_bandwidth

    return copy_bandwidth(device, (16 << 20) if tiny else (2 << 30))


def runners_of(args: argparse.Namespace, device: torch.device, bandwidth: float) -> dict[str, Callable[[], Iterable]]:
    """Name of a part -> what yields its findings. Imports happen inside, so that one part's need is not another's."""

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

        return attention.findings(device, bandwidth, args.tiny, args.sweep)

    def steps() -> Iterable:
        from bench.gpu import serving

        return serving.steps(device, bandwidth, args.tiny)

    def offline() -> Iterable:
        from bench.gpu import serving

        return serving.offline(device, args.tiny, not args.no_peer)

    return {"kernels": kernels, "equality": equality, "attention": attention, "steps": steps, "offline": offline}


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
