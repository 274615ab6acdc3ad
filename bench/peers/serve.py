"""What the scripts have in common: start a server, print its address when it is ready, end it when told to."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from bench.processes import get, stop

READY_S = 600.0


def serve_until_told(command: Sequence[str], base_url: str, ready_path: str, environ: Mapping[str, str]) -> int:
    """Run `command`; returns the exit status. Its output goes to standard error."""
    process = subprocess.Popen(command, env=dict(environ), stdout=sys.stderr, stderr=sys.stderr)

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        if not _is_ready(process, base_url + ready_path):
            sys.stderr.write(f"not ready: {' '.join(command)}\n")
            return 1
        sys.stdout.write(f"{base_url}\n")
        sys.stdout.flush()
        return process.wait()
    finally:
        stop(process)


def _is_ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if get(url, timeout_s=5.0) is not None:
            return True
        time.sleep(0.05)
    return False
