"""Servers as processes of their own: started on a free port, waited for, stopped by their own process id."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.machine import ROOT

STOP_S = 20.0


class ServerFailed(Exception):
    """A server did not come up; the message holds what it said."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str, timeout_s: float = 10.0, headers: dict[str, str] | None = None) -> bytes | None:
    """The body of a GET that succeeded; None for anything else. Goes through no proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers or {}), timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body
    except (urllib.error.URLError, OSError):
        return None


def post(url: str, body: Any, timeout_s: float = 600.0, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON answer to a POST of `body`. Raises ServerFailed with what the server said."""
    head = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            parsed: dict[str, Any] = json.load(answer)
            return parsed
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{url}: status {error.code}: {error.read()[:300].decode(errors='replace')}") from error
    except (urllib.error.URLError, OSError) as error:
        raise ServerFailed(f"{url}: {error}") from error


@contextlib.contextmanager
def quire(model: str | None, flags: Sequence[str], log: Path, limit_s: float = 600.0) -> Iterator[tuple[str, float]]:
    """`quire serve` on a free port; yields its address and the seconds from start to ready.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "server.cli", "serve", *([model] if model else []), "--port", str(port)]
    with running([*command, "--log-level", "warning", *flags], log) as process:
        began_s = time.perf_counter()
        wait_until_ready(process, f"{url}/ready", log, limit_s)
        yield url, time.perf_counter() - began_s


@contextlib.contextmanager
def from_command(command: str, log: Path, limit_s: float = 900.0) -> Iterator[str]:
    """A command that prints its server's base address as a line of its own once it is ready, and serves until stopped.

    Raises:
        ServerFailed: it ended before that, or took too long.
    """
    with running(shlex.split(command), log) as process:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and process.poll() is None:
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(("http://", "https://")) and line.strip().count(" ") == 0:
                    yield line.strip().rstrip("/").removesuffix("/v1")
                    return
            time.sleep(0.1)
        raise ServerFailed(f"`{command}` printed no address:\n{tail(log)}")


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log` and is ended, by its id, on the way out.

    It keeps the bytecode of what it imports, as an installed program has it, whatever this process was told.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONUNBUFFERED"] = "1"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and end it when it does not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, limit_s: float) -> None:
    """Wait until a GET of `url` succeeds. Raises ServerFailed when the process ends or the time is over."""
    deadline_s = time.monotonic() + limit_s
    while get(url, timeout_s=5.0) is None:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with status {process.returncode}:\n{tail(log)}")
        if time.monotonic() > deadline_s:
            raise ServerFailed(f"the server was not ready after {limit_s:.0f} s:\n{tail(log)}")
        time.sleep(0.02)


def tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all its threads, so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
