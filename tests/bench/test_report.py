"""Tables, charts and the command line: what is printed, also where something is missing."""

import importlib.util
import json
import math

import pytest

from bench.__main__ import keep, parse_args, plan_of
from bench.arrivals import Closed, Poisson
from bench.bounds import Bounds, ModelCost, round_s
from bench.figures import Record, Run, Slo, figures_of
from bench.plan import PRESETS, Cell
from bench.plots import Chart, as_text, charts_of, draw
from bench.report import Outcome, Session, alone_table, as_json, bound_share, knee_lines, main_table, table
from bench.targets import Served
from bench.workloads import mix_named

BOUNDS = Bounds(1e9, {"float32": 1e11, "bfloat16": 2e11})
COST = ModelCost(100_000_000, 1000, 100_000_000, 30_000_000, "float32")
MIX = mix_named("10/5")


def figures(ttft_s=0.1, tpot_s=0.2, num=2):
    records = tuple(
        Record(0.0, ttft_s + 4 * tpot_s, ttft_s, (tpot_s,) * 4, num_prompt_tokens=10, num_output_tokens=5)
        for _ in range(num)
    )
    return figures_of(Run(records, 0.01), Slo())


def session():
    made = Session("toy", Slo(), BOUNDS, {"ours": Served("org/toy", "float32", 100_000_000), "peer": Served()})
    made.costs["ours"] = COST
    made.gate["ours"] = "16/16"
    for users in (1, 4, 16):
        repeats = {"ours": [figures(num=users)] * 3, "peer": [figures(tpot_s=0.4, num=users)]}
        made.outcomes.append(Outcome(Cell(MIX, Closed(users), users, 3), repeats))
    made.outcomes.append(Outcome(Cell(MIX, Poisson(2.0), 8, 1), {"ours": [figures(num=8)]}))
    return made


def cells_of(markdown):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]


def test_a_table_has_as_many_columns_in_every_row():
    rows = cells_of(table(["a", "b"], [["1", "2"], ["3", "4"]]))
    assert rows == [["a", "b"], ["---", "---:"], ["1", "2"], ["3", "4"]]


def test_every_cell_and_target_has_its_row_with_the_ratio_to_the_first_target():
    head, _, *rows = cells_of(main_table(session()))
    assert len(rows) == 7
    assert {len(row) for row in rows} == {len(head)}
    first = dict(zip(head, rows[0], strict=True))
    second = dict(zip(head, rows[1], strict=True))
    assert (first["target"], first["load"], first["ratio"]) == ("ours", "1 user", "1.00")
    assert float(second["ratio"]) == pytest.approx(0.9 / 1.7, abs=0.01)
    assert first["TTFT s"] == "0.10 / 0.10 / 0.10"
    assert first["TPOT ms"] == "200.0 / 200.0 / 200.0"
    assert first["goodput /s"].endswith("(0%)")
    assert second["of bound"] == ""


def test_the_share_of_the_bound_is_least_time_over_measured_time():
    made = session()
    [one, *_, open_loop] = made.outcomes
    share = bound_share(made, one.cell, "ours", one.medians()["ours"])
    assert share == pytest.approx(round_s(COST, BOUNDS, 1, (10, 5)) / 0.9)
    assert bound_share(made, open_loop.cell, "ours", open_loop.medians()["ours"]) is None
    assert bound_share(made, one.cell, "peer", one.medians()["peer"]) is None


def test_a_single_user_is_held_against_prefill_and_decode():
    head, _, ours, peer = cells_of(alone_table(session()))
    assert ours[:4] == ["10/5", "ours", "100", "500"]
    assert (ours[5], ours[6]) == ("5.0", "10.0")
    assert peer[3] == peer[4] == ""
    assert len(head) == len(peer)


def test_knees_are_told_for_targets_with_enough_users():
    assert "ours: batching knee at 16 users" in knee_lines(session())


def test_json_holds_every_repeat_and_no_nan():
    made = session()
    made.outcomes[0].repeats["ours"][0] = figures_of(Run((Record(0.0, 1.0, num_output_tokens=1),)), Slo())
    text = json.dumps(as_json({"machine": "x"}, [made]), allow_nan=False)
    [kept] = json.loads(text)["sessions"]
    assert len(kept["cells"][0]["repeats"]["ours"]) == 3
    assert kept["cells"][0]["repeats"]["ours"][0]["ttft"]["p50"] is None


def test_a_text_chart_shows_each_series_and_its_knee():
    text = as_text(Chart("title", "x", "y", {"one": [(1, 1), (2, 4)], "two": [(1, 1)]}, {"one": 2}))
    assert "a one (knee at 2)" in text
    assert "b two" in text
    assert "*" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("has_matplotlib", [False, True])
def test_everything_is_kept_and_printed(tmp_path, monkeypatch, capsys, has_matplotlib):
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    keep(tmp_path, {"machine": "x"}, ["**busy**"], [session()])
    report = (tmp_path / "report.md").read_text()
    assert report in capsys.readouterr().out
    assert "- machine: x" in report
    assert "**busy**" in report
    assert json.loads((tmp_path / "figures.json").read_text())["facts"] == {"machine": "x"}
    assert bool(list(tmp_path.glob("*.png"))) == has_matplotlib
    assert ("throughput by users" in report) != has_matplotlib


def test_charts_need_points(tmp_path):
    assert len(charts_of(session())) == 3
    assert charts_of(Session("toy", Slo(), BOUNDS, {})) == []
    assert draw([], tmp_path)[0] == []


def test_the_command_line_replaces_what_it_names_and_keeps_the_rest():
    args = parse_args(["--users", "1,2", "--rates", "0.5", "--peer", "a=http://x/v1", "--slo", "2,0.5"])
    plan = plan_of(args, PRESETS["short"])
    assert (plan.users, plan.rates, plan.extras, plan.shares) == ((1, 2), (0.5,), (), ())
    assert (plan.mixes, plan.repeats) == (("128/64",), 3)
    assert (args.serve, args.peer, args.model) == ({"quire": ""}, {"a": "http://x/v1"}, ["smollm2"])
    assert args.slo == Slo(2.0, 0.5)
    assert not args.offline


def test_without_arguments_both_models_are_measured_offline_too():
    args = parse_args([])
    assert len(args.model) == 2
    assert args.offline
    assert plan_of(args, PRESETS["short"]) == PRESETS["short"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-serve"],
        ["--no-serve", "--serve", "a=", "--peer", "b=http://x"],
        ["--peer", "http://x"],
        ["--serve", "a=", "--peer", "a=http://x"],
        ["--mix", "fast"],
        ["--users", "0"],
        ["--peer", "a=http://x", "--model", "b", "--model", "c"],
    ],
)
def test_what_makes_no_sense_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err


def test_nan_is_printed_as_nothing():
    made = Session("toy", Slo(), BOUNDS, {"offline": Served()})
    run = Run((Record(0.0, 1.0, num_output_tokens=5),), given_wall_s=1.0)
    made.outcomes.append(Outcome(Cell(MIX, Closed(1), 1, 1), {"offline": [figures_of(run, Slo())]}))
    head, _, row = cells_of(main_table(made))
    shown = dict(zip(head, row, strict=True))
    assert shown["TTFT s"] == shown["goodput /s"] == ""
    assert math.isclose(float(shown["out tok/s"]), 5.0)
