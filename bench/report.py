"""Tables in Markdown and one JSON file, with everything needed to read the figures. Pure formatting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.arrivals import Closed
from bench.bounds import Bounds, ModelCost, decode_step_s, prefill_s, round_s
from bench.figures import Figures, Slo, Spread, knee, median_of
from bench.plan import Cell
from bench.targets import Served


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell's figures, by target, one entry per repeat."""

    cell: Cell
    repeats: Mapping[str, Sequence[Figures]]

    def medians(self) -> dict[str, Figures]:
        """By target."""
        return {name: median_of(figures) for name, figures in self.repeats.items()}


@dataclass(slots=True)
class Session:
    """Everything measured on one model.

    Attributes:
        gate: by target, what the correctness gate said.
        costs: by target, where it is known what the model makes the machine do.
        start_s: by target, seconds from start to ready, where the harness started it.
    """

    model: str
    slo: Slo
    bounds: Bounds
    served: dict[str, Served]
    gate: dict[str, str] = field(default_factory=dict)
    costs: dict[str, ModelCost] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)


def document(facts: Mapping[str, str], warnings: Sequence[str], sessions: Sequence[Session]) -> str:
    """The whole report."""
    head = [f"- {name}: {value}" for name, value in facts.items()]
    parts = ["# Benchmark", "\n".join(head), *warnings, *(section(session) for session in sessions)]
    return "\n\n".join(parts) + "\n"


def section(session: Session) -> str:
    """One model's part."""
    gemm = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in session.bounds.gemm_per_s.items())
    slo = f"goodput: TTFT within {session.slo.ttft_s:g} s and TPOT within {1000 * session.slo.tpot_s:g} ms"
    parts = [
        f"## {session.model}",
        f"Bounds measured around the run: stream read {session.bounds.read_bytes_per_s / 1e9:.1f} GB/s; GEMM, as torch "
        f"does it, {gemm} GFLOP/s. Greedy; prefix caches as the servers have them, but every prompt has a beginning of "
        f"its own, except in `prefix`; warm-up excluded; medians over repeats, servers in turn; {slo}.",
        served_table(session),
        main_table(session),
    ]
    if alone := alone_table(session):
        parts.append(alone)
    if knees := knee_lines(session):
        parts.append(knees)
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A Markdown table; the first `num_left` columns are words, the others figures."""
    rules = ["---" if number < num_left else "---:" for number in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))


def served_table(session: Session) -> str:
    """What each target is."""
    rows = []
    for name, served in session.served.items():
        size = f"{served.weight_bytes / 1e6:.0f}" if served.weight_bytes else "?"
        started = f"{session.start_s[name]:.1f}" if name in session.start_s else ""
        gate = session.gate.get(name, "not asked")
        rows.append(
            [
                name,
                (served.model or "?").rpartition("/")[2],
                served.dtype or "?",
                served.how or "running",
                gate,
                size,
                started,
            ]
        )
    head = ["target", "model", "dtype", "started as", "greedy tokens equal to transformers'", "weights MB", "ready s"]
    return table(head, rows, num_left=5)


def main_table(session: Session) -> str:
    """Every cell, every target."""
    rows = []
    for outcome in session.outcomes:
        medians = outcome.medians()
        first = next(iter(medians.values()))
        for name, figures in medians.items():
            rows.append(_row(session, outcome, name, figures, first))
    head = ["mix", "load", "target", "requests", "out tok/s", "ratio", "wall s", "TTFT s", "ITL ms", "TPOT ms"]
    note = "TTFT, ITL and TPOT: p50 / p95 / p99. Ratio: of the output rate, to the first target's."
    return table([*head, "goodput /s", "of bound", "generator"], rows, num_left=3) + f"\n\n{note}"


def _row(session: Session, outcome: Outcome, name: str, figures: Figures, first: Figures) -> list[str]:
    failed = f" ({figures.num_failed:.0f} failed)" if figures.num_failed else ""
    return [
        outcome.cell.mix.name,
        str(outcome.cell.arrival),
        name,
        f"{figures.num_requests:.0f}{failed}",
        f"{figures.output_tokens_per_s:.1f}{_range(outcome.repeats[name])}",
        f"{figures.output_tokens_per_s / first.output_tokens_per_s:.2f}" if first.output_tokens_per_s else "",
        f"{figures.wall_s:.2f}",
        spread_text(figures.ttft, 1, 2),
        spread_text(figures.itl, 1000, 1),
        spread_text(figures.tpot, 1000, 1),
        "" if math.isnan(figures.ttft.p50) else f"{figures.goodput_per_s:.2f} ({figures.goodput_share:.0%})",
        share_text(bound_share(session, outcome.cell, name, figures)),
        f"{figures.generator_cpu_share:.1%}" if figures.generator_cpu_share else "",
    ]


def _range(repeats: Sequence[Figures]) -> str:
    if len(repeats) < 2:
        return ""
    rates = [figures.output_tokens_per_s for figures in repeats]
    return f" ({min(rates):.1f}-{max(rates):.1f})"


def spread_text(spread: Spread, factor: float, digits: int) -> str:
    """`p50 / p95 / p99`, or nothing where nothing was measured."""
    if math.isnan(spread.p50):
        return ""
    return " / ".join(f"{factor * value:.{digits}f}" for value in (spread.p50, spread.p95, spread.p99))


def share_text(share: float | None) -> str:
    """A percentage, or nothing."""
    return "" if share is None else f"{share:.0%}"


def bound_share(session: Session, cell: Cell, name: str, figures: Figures) -> float | None:
    """Least time over measured time of a closed-loop cell whose questions are alike; None where it cannot be told."""
    cost = session.costs.get(name)
    if cost is None or cell.mix.lengths is None or not isinstance(cell.arrival, Closed) or figures.num_failed:
        return None
    num_rounds = cell.num_requests / cell.arrival.num_users
    lengths = (figures.num_prompt_tokens / figures.num_requests, figures.num_output_tokens / figures.num_requests)
    return num_rounds * round_s(cost, session.bounds, cell.arrival.num_users, lengths) / figures.wall_s


def alone_table(session: Session) -> str:
    """Single users against the bounds: prefill by TTFT, decode by TPOT."""
    rows = []
    for outcome in session.outcomes:
        if outcome.cell.arrival != Closed(1) or outcome.cell.mix.lengths is None:
            continue
        for name, figures in outcome.medians().items():
            if not math.isnan(figures.tpot.p50):
                rows.append([outcome.cell.mix.name, name, *_alone_cells(session, name, figures)])
    head = ["mix", "one user", "prefill tok/s", "bound", "reached", "decode tok/s", "bound", "reached"]
    return table(head, rows, num_left=2) if rows else ""


def _alone_cells(session: Session, name: str, figures: Figures) -> list[str]:
    num_in = figures.num_prompt_tokens / figures.num_requests
    num_out = figures.num_output_tokens / figures.num_requests
    prefill, decode = num_in / figures.ttft.p50, 1 / figures.tpot.p50
    cost = session.costs.get(name)
    if cost is None:
        return [f"{prefill:.0f}", "", "", f"{decode:.1f}", "", ""]
    most_prefill = num_in / prefill_s(cost, session.bounds, num_in)
    most_decode = 1 / decode_step_s(cost, session.bounds, 1, num_in + num_out / 2)
    return [
        f"{prefill:.0f}",
        f"{most_prefill:.0f}",
        share_text(prefill / most_prefill),
        f"{decode:.1f}",
        f"{most_decode:.1f}",
        share_text(decode / most_decode),
    ]


def users_curve(session: Session, name: str) -> list[tuple[int, Figures]]:
    """A target's closed-loop figures by users, of the mix that most users ran."""
    closed = [one for one in session.outcomes if isinstance(one.cell.arrival, Closed) and name in one.repeats]
    by_mix: dict[str, list[tuple[int, Figures]]] = {}
    for outcome in closed:
        assert isinstance(outcome.cell.arrival, Closed)
        point = (outcome.cell.arrival.num_users, outcome.medians()[name])
        by_mix.setdefault(outcome.cell.mix.name, []).append(point)
    longest: list[tuple[int, Figures]] = max(by_mix.values(), key=len, default=[])
    return sorted(longest, key=lambda point: point[0])


def knee_lines(session: Session) -> str:
    """Where more users stop paying, by target."""
    lines = []
    for name in session.served:
        curve = [(users, figures.output_tokens_per_s) for users, figures in users_curve(session, name)]
        if len(curve) >= 3:
            told = ", ".join(f"{users}: {rate:.0f}" for users, rate in curve)
            lines.append(
                f"- {name}: batching knee at {knee(curve)} users (80 % of the best rate); tok/s by users {told}"
            )
    return "\n".join(lines)


def as_json(facts: Mapping[str, str], sessions: Sequence[Session]) -> dict[str, Any]:
    """Everything, every repeat included; NaN becomes null."""
    return {"facts": dict(facts), "sessions": [_plain(_session(session)) for session in sessions]}


def _session(session: Session) -> dict[str, Any]:
    return {
        "model": session.model,
        "slo": asdict(session.slo),
        "bounds": {
            "read_bytes_per_s": session.bounds.read_bytes_per_s,
            "gemm_per_s": dict(session.bounds.gemm_per_s),
        },
        "served": {name: asdict(served) for name, served in session.served.items()},
        "gate": session.gate,
        "costs": {name: asdict(cost) for name, cost in session.costs.items()},
        "start_s": session.start_s,
        "cells": [
            {
                "mix": outcome.cell.mix.name,
                "about": outcome.cell.mix.about,
                "load": str(outcome.cell.arrival),
                "num_requests": outcome.cell.num_requests,
                "of_bound": {
                    name: bound_share(session, outcome.cell, name, figures)
                    for name, figures in outcome.medians().items()
                },
                "repeats": {name: [asdict(one) for one in repeats] for name, repeats in outcome.repeats.items()},
            }
            for outcome in session.outcomes
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
