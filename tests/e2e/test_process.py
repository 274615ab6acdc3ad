"""The server as a process: signals, exit statuses, and the terminal chat that starts one for itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

from tests.e2e.conftest import ROOT, ServerProcess

SMALL = ("--max-model-len", "1024", "--num-kv-blocks", "128", "--max-num-seqs", "2")


def test_health_answers_before_the_model_is_loaded_and_sigterm_then_stops_it(tmp_path):
    server = ServerProcess(tmp_path / "log", *SMALL)
    try:
        server.until(lambda: server.get("/health")[0] == 200, 60, "alive")
        status, body = server.get("/ready")
        assert (status, json.loads(body)["status"]) == (503, "loading")
        assert server.get("/metrics")[0] == 200
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 30
        assert "stopped" in server.log
    finally:
        server.close()


def test_a_second_signal_stops_at_once_and_the_client_hears_why(tmp_path):
    server = ServerProcess(tmp_path / "log", *SMALL).wait_ready()
    lines = []

    def read():
        body = {"prompt": "1, 2, 3,", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{server.base_url}/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as response:
            lines.extend(line.decode() for line in response)

    reader = threading.Thread(target=read)
    try:
        reader.start()
        server.until(lambda: server.metric("quire_generation_tokens_total") >= 3, 30, "a few tokens")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.get("/ready")[0] == 503, 10, "draining")
        assert server.process.poll() is None
        assert server.stop() == 0
        reader.join(30)
        assert lines[-2].strip() == "data: [DONE]"
        assert any("shut down" in line for line in lines[-6:])
    finally:
        server.close()


def test_chat_starts_a_server_of_its_own_and_stops_it():
    command = [
        sys.executable,
        "-m",
        "server.cli",
        "chat",
        "--temperature",
        "0",
        "--max-tokens",
        "6",
        "--dtype",
        "float32",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    chat = subprocess.run(
        [*command, *SMALL], input="Say hi.\n", capture_output=True, text=True, timeout=180, cwd=ROOT, env=environ
    )
    assert chat.returncode == 0, chat.stderr
    assert len(chat.stdout.strip()) > 2


LOOK_AT_COLLECTOR = """
import gc, os, signal, sys
from server import serve

def announce(service, loaded):
    print(gc.isenabled(), gc.get_freeze_count() > 100_000, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

serve.Service._announce = announce
sys.exit(serve.main(sys.argv[1:]))
"""


def test_garbage_is_collected_again_once_ready_and_never_looked_for_in_the_model():
    command = [sys.executable, "-c", LOOK_AT_COLLECTOR, "--port", "0", "--dtype", "float32", *SMALL]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environ)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
