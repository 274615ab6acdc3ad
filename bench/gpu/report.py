"""What a check found, and the table and file that it goes to."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        verdict: `ok`, `FAIL`, `skipped`, or empty for a plain measurement.
        details: everything else that was measured; for the file only.
    """

    part: str
    what: str
    value: str
    verdict: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def check(part: str, what: str, error: float, limit: float) -> Finding:
    """A relative error against its limit; NaN never passes."""
    return Finding(part, what, f"{error:.1e}", "ok" if error <= limit else "FAIL", {"error": error, "limit": limit})


def share(rate: float, bandwidth: float, of: str) -> str:
    """`rate` as a share of a bandwidth, called `of`; more than all of it does not come from the memory measured."""
    return f"{rate / bandwidth:.0%} of {of}" if rate <= bandwidth else f"beyond {of}: read from a cache"


def skipped(part: str, what: str, reason: str) -> Finding:
    """What was not done, and why."""
    return Finding(part, what, reason, "skipped")


def table(findings: Iterable[Finding]) -> str:
    """Markdown, columns aligned."""
    rows = [("part", "what", "result", ""), *((f.part, f.what, f.value, f.verdict) for f in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "| " + " | ".join("-" * max(3, width) for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def write(path: Path, head: Mapping[str, Any], findings: Iterable[Finding]) -> None:
    """Everything, as JSON."""
    content = {**head, "findings": [asdict(finding) for finding in findings]}
    path.write_text(json.dumps(content, indent=1) + "\n")
