"""transformers' own server on a folder with safetensors.

    python3 -m venv PEER && PEER/bin/pip install 'transformers[serving]' accelerate torch
    python -m bench.peers.transformers_serve FOLDER --venv PEER

Without continuous batching it answers one request after the other; `--continuous-batching` takes several at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import num_cores
from bench.peers.serve import serve_until_told
from bench.processes import free_port


def main(argv: Sequence[str] | None = None) -> int:
    """Start it, print its address, serve until told to end."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.transformers_serve", description=__doc__.splitlines()[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--venv", type=Path, help="where transformers is installed; else this Python's own")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--continuous-batching", action="store_true")
    args = parser.parse_args(argv)
    folder = args.venv / "bin" if args.venv else Path(sys.executable).parent
    port = free_port()
    command = [
        *(str(folder / "transformers"), "serve", str(args.model.resolve())),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", args.dtype),
        *(["--continuous-batching"] if args.continuous_batching else []),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    return serve_until_told(command, f"http://127.0.0.1:{port}", "/health", environ)


if __name__ == "__main__":
    sys.exit(main())
