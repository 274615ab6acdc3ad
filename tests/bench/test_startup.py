"""The start-up table: phases from a log, and the sums."""

import json
import sys
from pathlib import Path

import pytest

from bench.processes import running
from bench.startup import ANSWER, FIRST, LAST, READY, phases_of, report


def line(logger: str, message: str) -> str:
    return json.dumps({"time": "", "level": "info", "logger": logger, "message": message})


def test_phases_come_in_order_and_repeated_ones_add_up() -> None:
    log = "\n".join(
        [
            line("quire.serve", "listening on http://127.0.0.1:1"),
            line("quire.load", "importing torch: 1.50 s"),
            line("quire.load", "loading weights: 0.25 s"),
            line("quire.load", "loading weights: 0.50 s"),
            line("quire.serve", "ready after 3.0 s: POST http://127.0.0.1:1"),
        ]
    )
    assert phases_of(log) == {"importing torch": 1.5, "loading weights": 0.75}
    assert list(phases_of(log)) == ["importing torch", "loading weights"]


def test_the_table_shows_medians_and_judges_the_bar() -> None:
    starts = [{FIRST: 0.5, "loading weights": s, LAST: 0.1, READY: 3.0 + s, ANSWER: 4.0} for s in (1.0, 3.0, 1.5)]
    text = report(starts)
    assert "| loading weights | 1.50 | 1.00 | 3.00 |" in text
    assert text.endswith("met.")
    assert report([{**start, READY: 5.5} for start in starts]).endswith("missed.")


def test_a_started_server_keeps_bytecode_whatever_this_process_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    with running(command, tmp_path / "log") as process:
        assert process.wait(30) == 0
    assert (tmp_path / "log").read_text() == "False\n"
