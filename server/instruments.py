"""The numbers behind /metrics, cheap enough for every token: histograms and labelled counts as plain lists and dicts.

Knows how to count and how to describe itself to the Prometheus library at scrape time. Knows no metric by name.
All of it lives on the event loop, so nothing is locked.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Labels = Mapping[str, str]


class Histogram:
    """Observations sorted into buckets; `bounds` are their inclusive upper ends, ascending, without +Inf."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Sum of the observations."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """`(le, observations <= le)` for every bucket, +Inf last: the shape Prometheus wants."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows


class LabelledCount:
    """A count for each combination of label values. Whoever adds must keep the set of values bounded."""

    __slots__ = ("_values", "label_names")

    def __init__(self, *label_names: str) -> None:
        self.label_names = label_names
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, count: float = 1) -> None:
        """Add `count` to the cell of these label values, given in the order of `label_names`."""
        assert len(labels) == len(self.label_names), f"labels {self.label_names} got {labels}"
        self._values[labels] = self._values.get(labels, 0) + count

    def value(self, *labels: str) -> float:
        """The count of one cell; 0 when nothing was added."""
        return self._values.get(labels, 0)

    def cells(self) -> list[tuple[tuple[str, ...], float]]:
        """Every cell that was added to."""
        return list(self._values.items())


def histogram_family(
    name: str, help: str, cells: Iterable[tuple[Labels, Histogram]], label_names: Sequence[str] = ()
) -> HistogramMetricFamily:
    """A histogram metric with one series for each of `cells`."""
    family = HistogramMetricFamily(name, help, labels=label_names)
    for labels, histogram in cells:
        family.add_metric([labels[key] for key in label_names], histogram.cumulative(), histogram.sum)
    return family


def counter_family(
    name: str, help: str, cells: Iterable[tuple[Sequence[str], float]], label_names: Sequence[str] = ()
) -> CounterMetricFamily:
    """A counter metric; `name` is given without the `_total` that Prometheus adds."""
    family = CounterMetricFamily(name, help, labels=label_names)
    for values, count in cells:
        family.add_metric(list(values), count)
    return family


def gauge_family(
    name: str, help: str, cells: Iterable[tuple[Sequence[str], float]], label_names: Sequence[str] = ()
) -> GaugeMetricFamily:
    """A gauge metric with one series for each of `cells`."""
    family = GaugeMetricFamily(name, help, labels=label_names)
    for values, value in cells:
        family.add_metric(list(values), value)
    return family
