"""`bench/gpu_check.py` on a machine without a GPU: its arguments, its table, and every part in tiny form on the CPU."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu.isolation import run_apart
from bench.gpu.report import Finding, check, share, skipped, table
from engine.attention import optional
from tests.fakes.attention_libraries import fake_flash_attn, fake_flashinfer

TINY = ("--device", "cpu", "--tiny")
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@no_cuda
def test_without_cuda_it_says_so_and_checks_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "out.json")]) == 2
    assert "no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_cpu_is_only_for_the_tiny_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu"]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_parts_run_in_their_own_order() -> None:
    assert gpu_check.parse_args(["--only", "offline,kernels"]).only == ("kernels", "offline")
    assert gpu_check.parse_args([]).only == gpu_check.PARTS


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse_args(["--only", "kernel"])
    assert "no part 'kernel'" in capsys.readouterr().err


def rate() -> list[Finding]:
    return [Finding("bandwidth", "copy", "1", details={"bytes_per_s": 1.0})]


def test_a_part_that_breaks_costs_neither_the_others_nor_the_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks() -> Iterator[Finding]:
        yield Finding("steps", "first", "1")
        raise RuntimeError("no more memory")

    def works() -> list[Finding]:
        return [Finding("offline", "second", "2")]

    parts = {"bandwidth": rate, "steps": breaks, "offline": works}
    monkeypatch.setattr(gpu_check, "runners_of", lambda *_: parts)
    out = tmp_path / "out.json"
    assert gpu_check.main([*TINY, "--together", "--only", "steps,offline", "--out", str(out)]) == 1
    findings = json.loads(out.read_text())["findings"]
    assert [finding["what"] for finding in findings[1:]] == ["first", "broke off", "second"]
    assert "no more memory" in findings[2]["value"]


PART = """
import pathlib, signal, sys, time
file = pathlib.Path(sys.argv[-1]).open("w")
line = '{"part": "steps", "what": "%s", "value": "1", "verdict": "", "details": {}}'
print(line % "first", file=file, flush=True)
"""
"""A part's process that has one finding; what follows is how it ends."""


def run_part(ending: str, limit_s: float = 60.0, *, must_end: bool = False) -> list[Finding]:
    return run_apart("steps", [sys.executable, "-c", PART + ending], limit_s, must_end=must_end)


def test_a_part_in_its_own_process_hands_over_what_it_found() -> None:
    found = run_part("print(line % 'second', file=file)")
    assert [(finding.what, finding.verdict) for finding in found] == [("first", ""), ("second", "")]


@pytest.mark.parametrize("ending", ["signal.raise_signal(signal.SIGSEGV)", "sys.exit(3)"])
def test_a_part_whose_process_dies_has_failed_but_for_what_it_found(ending: str) -> None:
    found = run_part(f"print(line[:20], end='', file=file, flush=True)\n{ending}")
    assert [(finding.what, finding.verdict) for finding in found] == [("first", ""), ("the rest", "FAIL")]


@pytest.mark.parametrize(("must_end", "verdict"), [(True, "FAIL"), (False, "skipped")])
def test_a_part_that_takes_too_long_is_ended_and_named(must_end: bool, verdict: str) -> None:
    found = run_part("time.sleep(600)", limit_s=2.0, must_end=must_end)
    assert [(finding.what, finding.verdict) for finding in found] == [("first", ""), ("the rest", verdict)]
    assert "cut short after 1 results: 2 s are over; --only steps" in found[1].value


def deadlines(*arguments: str) -> dict[str, float]:
    return gpu_check.deadlines_of(gpu_check.parse_args(arguments))


def test_deadlines_share_the_time_and_end_within_it() -> None:
    whole = deadlines()
    assert tuple(whole) == gpu_check.PARTS
    assert list(whole.values()) == sorted(whole.values())
    assert whole["offline"] == pytest.approx(300)
    assert deadlines("--seconds", "60")["offline"] == pytest.approx(60)
    few = deadlines("--only", "kernels")
    assert tuple(few) == ("bandwidth", "kernels")
    assert few["kernels"] == pytest.approx(300)
    swept = deadlines("--sweep")
    assert swept["equality"] == whole["equality"]
    assert swept["offline"] == pytest.approx(300 + gpu_check.SWEEP_S)


def test_parts_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """The script as a user starts it, from another folder; parts get what bandwidth found."""
    out = tmp_path / "out.json"
    script = Path(gpu_check.__file__).resolve()
    command = [sys.executable, str(script), *TINY, "--only", "attention", "--out", str(out)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    findings = json.loads(out.read_text())["findings"]
    assert [finding["part"] for finding in findings] == ["bandwidth", "decode attention", "decode attention"]
    measured = findings[1]["details"]["bytes_per_s"] / findings[0]["details"]["bytes_per_s"]
    assert f"{measured:.0%} of a copy" in findings[1]["value"]


NEEDLESS = "gguf llguidance fastapi starlette sse_starlette uvicorn pydantic prometheus_client jsonschema openai psutil"


def test_every_part_in_tiny_form_needs_only_torch_triton_and_transformers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NEEDLESS.split()!r}))\n"
        "from bench import gpu_check\n"
        f"sys.exit(gpu_check.main({[*TINY, '--together', '--no-peer', '--out', str(out)]!r}))"
    )
    root = Path(gpu_check.__file__).resolve().parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    written = json.loads(out.read_text())
    verdicts = {finding["part"]: finding["verdict"] for finding in written["findings"]}
    assert verdicts == {
        "bandwidth": "",
        "kernels": "skipped",
        "transformers": "ok",
        "decode attention": "",
        "decode step": "",
        "offline": "",
    }
    assert all(finding["value"] in result.stdout for finding in written["findings"])
    assert written["torch"] == torch.__version__


def test_optional_libraries_are_checked_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins: the question itself must not be what is wrong."""
    monkeypatch.setattr(optional, "capability_of", lambda device: (9, 0))
    kernels = pytest.importorskip("bench.gpu.kernels", reason="triton is not installed")

    def ask(name: str) -> Finding:
        steps = {"mixed": [(4, 1), (130, 1), (0, 7), (255, 4)]}
        return kernels.by_library(name, kernels.LIBRARIES[name], torch.device("cpu"), torch.float16, steps)

    for name, module, library in (
        ("flashinfer", "flashinfer", fake_flashinfer()),
        ("flash-attn", "flash_attn", fake_flash_attn()),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        assert (ask(name).verdict, ask(name).value[:30]) == ("skipped", f"{module} cannot be imported (import"[:30])
        monkeypatch.setitem(sys.modules, module, library)
        found = ask(name)
        assert found.verdict == "ok"
        assert set(found.details) == {"mixed window None", "mixed window 100"}


def test_errors_are_judged() -> None:
    assert check("p", "w", 1e-3, 1e-2).verdict == "ok"
    assert check("p", "w", 2e-2, 1e-2).verdict == "FAIL"
    assert check("p", "w", math.nan, 1e-2).verdict == "FAIL"


def test_the_table_is_aligned_markdown() -> None:
    lines = table([Finding("a", "something long", "1"), skipped("part", "b", "why not")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == {"|", "-", " "}
    assert "skipped" in lines[3]


def test_more_than_the_bandwidth_is_no_share_of_it() -> None:
    assert share(0.5e9, 1e9, "a copy") == "50% of a copy"
    assert share(3e9, 1e9, "a copy") == "beyond a copy: read from a cache"
