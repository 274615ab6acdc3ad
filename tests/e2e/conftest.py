"""Real server processes with the embedded model, on free ports, in float32; each ended by its own process id."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 120.0, 60.0


class ServerProcess:
    """`quire serve` as a process of its own."""

    def __init__(self, log_file, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.root = f"http://127.0.0.1:{self.port}"
        self.base_url = f"{self.root}/v1"
        self.log_file = log_file
        command = [sys.executable, "-m", "server.cli", "serve", "--port", str(self.port), "--dtype", "float32"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        with log_file.open("wb") as log:
            self.process = subprocess.Popen([*command, *flags], cwd=ROOT, env=environ, stdout=log, stderr=log)

    @property
    def log(self):
        return self.log_file.read_text(errors="replace")

    def get(self, path):
        """(status, text) of a GET; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.root + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def until(self, condition, seconds, what):
        """Poll `condition` until it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s:\n{self.log}"
            time.sleep(0.05)

    def wait_ready(self):
        self.until(lambda: self.get("/ready")[0] == 200, START_S, "ready")
        return self

    def metric(self, name, **labels):
        """Sum of the samples of `name` whose labels include `labels`."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:{{(.*)}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def is_idle(self):
        held = self.metric("quire_kv_blocks", state="referenced")
        return held == 0 and self.metric("quire_requests_running") == 0 and self.metric("quire_requests_waiting") == 0

    def wait_idle(self):
        self.until(self.is_idle, 20, "idle")

    def stop(self, number=signal.SIGTERM):
        """Ask it to end and wait; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def close(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Start a server with flags of its own: `start_server("--max-num-seqs", "1")`."""
    servers = []

    def start(*flags):
        server = ServerProcess(tmp_path_factory.mktemp("server") / "log", *flags)
        servers.append(server)
        return server.wait_ready()

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def shared_server(start_server):
    return start_server("--max-model-len", "2048", "--num-kv-blocks", "2048", "--max-num-seqs", "32")


@pytest.fixture
def server(shared_server):
    """The shared server, idle before and after each test."""
    shared_server.wait_idle()
    yield shared_server
    shared_server.wait_idle()
