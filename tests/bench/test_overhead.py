"""The no-op engines and what measures with them: every step and token is there; no time is judged."""

import pytest

from bench.noop import NoOpEngine, engine_around
from bench.step_costs import DEPTHS, HEAD, row, verdict, watch_steps
from bench.stream_costs import stream_table
from engine.batch import Batch, Row, SlotStart
from engine.sampling.params import SamplingParams

START = SlotStart(0, SamplingParams(temperature=0.0), 0, (5, 6, 7))
PREFILL = Batch(1, (START,), (), (Row(0, 0, (5, 6), 0, (0,), sample=False), Row(1, 4, (9,), 0, (1,), sample=True)))


async def test_the_no_op_engine_says_its_script_by_position():
    for hops in (False, True):
        engine = NoOpEngine((10, 11, 12), 4, 100, hops=hops)
        output = await engine.step(PREFILL)
        assert [row.token_ids for row in output.rows] == [(), (12,)]
        assert output.step == 1
        engine.close()


def test_the_real_engine_around_nothing_samples_what_zeros_say():
    engine = engine_around(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=8)
    output = engine.step_sync(Batch(1, (START,), (), (Row(0, 0, (5, 6, 7), 0, (0,), sample=True),)))
    assert len(output.rows[0].token_ids) == 1
    engine.close()


@pytest.mark.parametrize("depth", DEPTHS)
async def test_steps_are_watched_while_all_rows_decode(depth):
    moments = await watch_steps(depth, num_rows=3, num_steps=5)
    assert len(moments) == 5
    assert {moment.report.num_rows for moment in moments} == {3}
    cells = row(depth, 3, moments)
    assert len(cells) == len(HEAD)
    assert cells[:2] == [depth, "3"]


def test_the_bar_is_for_the_whole_host():
    assert verdict(DEPTHS[-1], 256, 1.4) == "1.5 ms met"
    assert verdict(DEPTHS[-1], 1, 0.31) == "0.3 ms missed"
    assert verdict(DEPTHS[0], 1, 9.0) == verdict(DEPTHS[-1], 32, 9.0) == ""


def test_streams_go_through_a_server_process_and_are_all_counted():
    lines = stream_table((2,), num_rounds=1).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["completions", "chat"]
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["512", "512"]
