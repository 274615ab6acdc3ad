"""A small measurement against a server in this process, from cells to figures."""

import pytest

from bench.arrivals import Closed, Poisson
from bench.figures import Run, Slo
from bench.plan import PRESETS, Cell, Plan
from bench.processes import ServerFailed, from_command, tail
from bench.session import capacity_per_s, effort, run_cell, warm_up
from bench.targets import HttpTarget, Served
from bench.workloads import Prose, fixed

PROSE = Prose(tuple(b"one two three four five six seven eight nine ten "))


@pytest.fixture
def target(live_url):
    made = HttpTarget("ours", live_url, lambda ids: bytes(ids).decode())
    made.learn_dialect(fixed(20, 4).questions(PROSE, 1, "probe")[0])
    return made


def test_cells_run_on_each_target_in_turn(target, live_url):
    twin = HttpTarget("twin", live_url, target.decode)
    twin.dialect = target.dialect
    warm_up(Plan(users=(2,)), [target, twin], PROSE)
    cell = Cell(fixed(20, 6), Closed(2), num_requests=4, repeats=2)
    outcome = run_cell(cell, [target, twin], PROSE, Slo())
    assert {name: len(repeats) for name, repeats in outcome.repeats.items()} == {"ours": 2, "twin": 2}
    for figures in outcome.medians().values():
        assert (figures.num_failed, figures.num_output_tokens, figures.num_prompt_tokens) == (0, 24, 80)
    assert outcome.medians()["ours"].num_cached_tokens == 0
    assert capacity_per_s([outcome], "ours") > 0


def test_an_open_loop_reaches_the_same_server(target):
    outcome = run_cell(Cell(fixed(20, 4), Poisson(200.0), 10, 1), [target], PROSE, Slo())
    assert outcome.medians()["ours"].num_output_tokens == 40


def test_a_shared_prefix_comes_from_the_cache(target):
    from bench.workloads import shared_prefix

    mix = shared_prefix(num_shared=64, num_own=8, num_out=4)
    outcome = run_cell(Cell(mix, Closed(1), 4, 1), [target], PROSE, Slo())
    assert outcome.medians()["ours"].num_cached_tokens == 3 * 64


def test_a_server_that_fails_everything_stops_the_run(target):
    too_long = Cell(fixed(2000, 100), Closed(1), 2, 1)
    with pytest.raises(ServerFailed, match="every request of 2000/100, 1 user failed: status 400"):
        run_cell(too_long, [target], PROSE, Slo())


class Flaky:
    """A target of which one request in two fails."""

    name = "flaky"
    served = Served()

    def run(self, arrival, questions, seed):
        from bench.figures import Record

        good = Record(0.0, 1.0, 0.5, (), 3, 2)
        return Run((good, Record(0.0, 1.0, error="no")))


def test_some_failures_are_counted_and_told():
    outcome = run_cell(Cell(fixed(3, 2), Closed(1), 2, 1), [Flaky()], PROSE, Slo())
    assert outcome.medians()["flaky"].num_failed == 1


def test_a_peer_is_started_by_a_command_and_ended_by_its_id(tmp_path):
    log = tmp_path / "log"
    command = "python3 -u -c \"import time; print('loading'); print('http://127.0.0.1:9/v1'); time.sleep(60)\""
    with from_command(command, log) as url:
        assert url == "http://127.0.0.1:9"
    assert "loading" in tail(log)
    with pytest.raises(ServerFailed, match="printed no address"), from_command("python3 -c 'print(1)'", log):
        pass


def test_efforts_stand_for_time() -> None:
    cells = PRESETS["short"].closed_cells()
    by_load = {str(cell): effort(cell, PROSE) for cell in cells}
    assert by_load["128/64, 1 user"] == 4 * (64 + 128 / 4)
    assert by_load["2000/64, 1 user"] > 5 * by_load["128/64, 1 user"], "a long prompt counts"
    assert effort(Cell(fixed(20, 4), Poisson(2.0), 40, 1), PROSE) == 20.0, "at a rate, time is the requests' own"


def test_every_run_of_a_cell_is_told_as_it_ends() -> None:
    told: list[str] = []
    run_cell(Cell(fixed(3, 2), Closed(1), 2, repeats=3), [Flaky()], PROSE, Slo(), told.append)
    assert told == ["flaky"] * 3
