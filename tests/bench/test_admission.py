"""The admission benchmark at small size: everything is answered with and without the forecast, and it helps."""

from dataclasses import replace

from bench.admission import HEAD, LOADS, Counts, compare


def test_a_row_for_a_load() -> None:
    load = next(each for each in LOADS if each.name == "exponential, 190")
    row = dict(zip(HEAD, compare(replace(load, num_requests=80), 1), strict=True))
    assert int(row["with"]) < int(row["preemptions without"]) / 2
    assert float(row["tokens"].removesuffix(" x")) < 0.95


def test_every_load_fits_its_pool() -> None:
    for load in LOADS:
        row = compare(replace(load, num_requests=6), 1)
        assert len(row) == len(HEAD)


def test_time_is_steps_and_tokens() -> None:
    assert Counts(num_steps=3, num_tokens=50).time(200) == 650
