"""The latency-throughput curve and the batching knee: as pictures with matplotlib, else as text."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import knee
from bench.report import Session, users_curve

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 64, 16


@dataclass(frozen=True, slots=True)
class Chart:
    """Series of points by name. `marks` are x positions to point out, by the series' name."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    marks: Mapping[str, float]


def charts_of(session: Session) -> list[Chart]:
    """The charts that a session has points for."""
    found = [latency_chart(session, "TTFT"), latency_chart(session, "TPOT"), knee_chart(session)]
    return [chart for chart in found if any(len(points) > 2 for points in chart.series.values())]


def latency_chart(session: Session, what: str) -> Chart:
    """p50 of a latency over throughput, of every cell of the mix with the most cells; one point a cell."""
    names = [outcome.cell.mix.name for outcome in session.outcomes]
    mix = max(names, key=names.count) if names else ""
    series: dict[str, list[tuple[float, float]]] = {}
    for outcome in session.outcomes:
        if outcome.cell.mix.name != mix:
            continue
        for name, figures in outcome.medians().items():
            latency = figures.ttft.p50 if what == "TTFT" else figures.tpot.p50
            if not math.isnan(latency):
                series.setdefault(name, []).append((figures.output_tokens_per_s, 1000 * latency))
    ordered = {name: sorted(points) for name, points in series.items()}
    return Chart(f"{session.model}, {mix}: {what} over throughput", "output tokens/s", f"{what} p50, ms", ordered, {})


def knee_chart(session: Session) -> Chart:
    """Throughput by users, with each target's knee."""
    series: dict[str, Points] = {}
    marks: dict[str, float] = {}
    for name in session.served:
        curve = [(users, figures.output_tokens_per_s) for users, figures in users_curve(session, name)]
        if curve:
            series[name] = curve
            marks[name] = knee(curve)
    return Chart(f"{session.model}: throughput by users", "users", "output tokens/s", series, marks)


def draw(charts: Sequence[Chart], folder: Path) -> tuple[list[Path], str]:
    """Pictures in `folder` where matplotlib is installed, and the same charts as text otherwise."""
    if importlib.util.find_spec("matplotlib") is None:
        return [], "\n\n".join(map(as_text, charts))
    return [_picture(chart, folder / f"chart-{number}.png") for number, chart in enumerate(charts, 1)], ""


def _picture(chart: Chart, path: Path) -> Path:
    import matplotlib  # type: ignore[import-not-found, unused-ignore]  # an optional extra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in chart.series.items():
        [line] = axes.plot(*_columns(points), marker="o", label=name)
        if name in chart.marks:
            axes.axvline(chart.marks[name], color=line.get_color(), linestyle=":", alpha=0.6)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _columns(points: Points) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]


def as_text(chart: Chart) -> str:
    """A chart of characters: one letter per series, `*` where two meet."""
    points = [point for series in chart.series.values() for point in series]
    most_x, most_y = (max((point[axis] for point in points), default=1.0) or 1.0 for axis in (0, 1))
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    letters = dict(zip(chart.series, "abcdefghijklmnopqrstuvwxyz", strict=False))
    for name, series in chart.series.items():
        for x, y in series:
            row = rows[HEIGHT - 1 - round(y / most_y * (HEIGHT - 1))]
            column = round(x / most_x * (WIDTH - 1))
            row[column] = letters[name] if row[column] in (" ", letters[name]) else "*"
    labels = [f"{most_y:10.4g}", *[" " * 10] * (HEIGHT - 2), f"{0:10d}"]
    body = [f"{label} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    legend = "  ".join(
        f"{letter} {name}" + (f" (knee at {chart.marks[name]:g})" if name in chart.marks else "")
        for name, letter in letters.items()
    )
    axis = f"{'':10} +{'-' * WIDTH}\n{'':11} 0{chart.x_label:^{WIDTH - 12}}{most_x:>10.4g}"
    return "\n".join([f"{chart.title} ({chart.y_label})", *body, axis, f"{'':11} {legend}"])
