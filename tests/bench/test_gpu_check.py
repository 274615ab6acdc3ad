"""`bench/gpu_check.py` on a machine without a GPU: its arguments, its table, and every part in tiny form on the CPU."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu.report import Finding, check, skipped, table

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


def test_every_part_in_tiny_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = "bandwidth,equality,attention,steps,offline"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--no-peer", "--only", names, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    found = {finding["part"] for finding in written["findings"]}
    assert found == {"bandwidth", "transformers", "decode attention", "decode step", "offline"}
    assert [f["verdict"] for f in written["findings"] if f["part"] == "transformers"] == ["ok"]
    printed = capsys.readouterr().out
    assert all(finding["value"] in printed for finding in written["findings"])
    assert written["torch"] == torch.__version__


def test_kernels_are_skipped_by_name_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "out.json"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--only", "kernels", "--out", str(out)]) == 0
    [_, kernels] = json.loads(out.read_text())["findings"]
    assert kernels["verdict"] == "skipped"


def test_a_part_that_breaks_costs_neither_the_others_nor_the_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks() -> Iterator[Finding]:
        yield Finding("steps", "first", "1")
        raise RuntimeError("no more memory")

    def works() -> list[Finding]:
        return [Finding("offline", "second", "2")]

    monkeypatch.setattr(gpu_check, "runners_of", lambda *_: {"steps": breaks, "offline": works})
    out = tmp_path / "out.json"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--out", str(out)]) == 1
    findings = json.loads(out.read_text())["findings"]
    assert [finding["what"] for finding in findings[1:]] == ["first", "broke off", "second"]
    assert "no more memory" in findings[2]["value"]


def test_errors_are_judged() -> None:
    assert check("p", "w", 1e-3, 1e-2).verdict == "ok"
    assert check("p", "w", 2e-2, 1e-2).verdict == "FAIL"
    assert check("p", "w", math.nan, 1e-2).verdict == "FAIL"


def test_the_table_is_aligned_markdown() -> None:
    lines = table([Finding("a", "something long", "1"), skipped("part", "b", "why not")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == {"|", "-", " "}
    assert "skipped" in lines[3]
