"""A part in a process of its own, for so long and no longer: what it found until then is kept, whatever ends it.

A kernel that goes astray takes a process's whole CUDA context with it, and one that hangs cannot be stopped from
inside. So each finding is a line in a file as soon as it is known, and the parent reads the file afterwards.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.gpu.report import Finding, skipped


def write_lines(findings: Iterable[Finding], path: Path) -> None:
    """In the part's process: each finding as it comes."""
    with path.open("w") as file:
        for finding in findings:
            print(json.dumps(asdict(finding)), file=file, flush=True)


def run_apart(name: str, command: Sequence[str], limit_s: float, *, must_end: bool) -> list[Finding]:
    """Findings of the part that `command` and a file's name run. Cut short it has failed if it `must_end`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings"
        status = _wait([*command, str(path)], limit_s)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        findings = [Finding(**json.loads(line)) for line in lines if line.endswith("\n")]
    if status is None:
        done = f"after {len(findings)} results" if findings else "before any result"
        told = f"cut short {done}: {limit_s:.0f} s are over; --only {name} --seconds N gives it more"
        findings.append(Finding(name, "the rest", told, "FAIL") if must_end else skipped(name, "the rest", told))
    elif status != 0:
        findings.append(Finding(name, "the rest", f"its process ended with status {status}", "FAIL"))
    return findings


def _wait(command: Sequence[str], limit_s: float) -> int | None:
    """Its exit status; None when it had to be killed."""
    try:
        return subprocess.run(command, timeout=max(0.1, limit_s), check=False).returncode
    except subprocess.TimeoutExpired:
        return None
