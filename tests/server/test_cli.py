import socket
import subprocess
import sys

import pytest

from server.cli import main
from server.openmp import tame_thread_barriers
from server.serve import bind, url_of


def quire(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *argv], capture_output=True, text=True, timeout=60, **kwargs
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["version"]])
def test_the_command_answers_without_anything_heavy(argv):
    heavy = "{'torch', 'transformers', 'fastapi'}"
    code = f"import sys; from server.cli import main; main({argv!r}); print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.endswith("[]\n")


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_each_command_explains_itself_without_torch(command):
    code = (
        "import sys\nfrom server.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit as stop: print('status', stop.code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"usage: quire {command}" in result.stdout
    assert result.stdout.endswith("status 0 False\n")


def test_version_is_the_packages(capsys):
    from importlib.metadata import version

    assert main(["version"]) == 0
    assert capsys.readouterr().out == version("quire") + "\n"


def test_an_unknown_command_is_refused(capsys):
    assert main(["sreve"]) == 2
    assert "unknown command 'sreve'" in capsys.readouterr().err


def test_a_wrong_setting_stops_the_start_with_one_line():
    result = quire("serve", "--port", "70000")
    assert result.returncode == 2
    assert result.stderr == "quire serve: --port: expected a whole number from 0 to 65535, got '70000'\n"


def test_a_taken_port_stops_the_start_with_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = quire("serve", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "cannot listen on 127.0.0.1" in result.stderr


def test_a_key_file_without_keys_stops_the_start(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none\n")
    result = quire("serve", "--port", "0", "--api-key-file", str(file))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert str(file) in result.stderr


def test_a_missing_model_is_one_line_and_status_1(tmp_path):
    result = quire("serve", str(tmp_path / "nothing"), "--port", "0")
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if "cannot serve: " in line]
    assert "nothing" in line
    assert "Traceback" not in result.stderr


def test_thread_barriers_are_tamed_unless_the_user_did():
    environ = {}
    tame_thread_barriers(environ)
    assert environ == {"GOMP_SPINCOUNT": "1000"}
    for mine in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        environ = dict(mine)
        tame_thread_barriers(environ)
        assert environ == mine


def test_bind_takes_a_free_port_and_tells_its_url():
    listener = bind("127.0.0.1", 0)
    try:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
