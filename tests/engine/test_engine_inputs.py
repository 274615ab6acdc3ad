"""From batches to tensors: against a token-by-token construction."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import PENDING, Batch, Row
from engine.inputs import Columns, InputBuilder, StepInputs, lay_out, lay_out_singles
from kvpool.table import blocks_for

CPU = torch.device("cpu")
MAX_SEQS, MAX_TOKENS, MAX_LEN = 6, 64, 50


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows in distinct slots with scattered blocks of 4; token ids tell their slot (`id // 1000`)."""
    slots = draw(st.lists(st.integers(0, MAX_SEQS - 1), min_size=1, max_size=MAX_SEQS, unique=True))
    rows = []
    for slot in slots:
        count = draw(st.one_of(st.just(1), st.integers(1, 10)))
        start = draw(st.integers(0, MAX_LEN - count))
        random = draw(st.randoms(use_true_random=False))
        token_ids = tuple(1000 * slot + random.randrange(1000) for _ in range(count))
        blocks = tuple(random.sample(range(100), blocks_for(start + count, 4)))
        targets = token_ids[1 : 1 + draw(st.integers(0, count))]
        rows.append(Row(slot, start, token_ids, 0, blocks, draw(st.booleans()), prompt_targets=targets))
    return Batch(1, (), (), tuple(rows))


@settings(deadline=None)
@given(batches())
def test_every_token_is_where_it_belongs(batch: Batch) -> None:
    inputs = InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU).build(batch)
    attention = inputs.attention
    starts = attention.query_starts.tolist()
    row_of_slot = {row.slot: row for row in batch.rows}
    rows = [row_of_slot.pop(int(inputs.token_ids[start]) // 1000) for start in starts[:-1]]
    assert not row_of_slot
    assert attention.num_tokens == batch.num_tokens == len(inputs.token_ids)
    for index, row in enumerate(rows):
        tokens = slice(starts[index], starts[index + 1])
        positions = range(row.start, row.start + len(row.token_ids))
        assert inputs.token_ids[tokens].tolist() == list(row.token_ids)
        assert inputs.positions[tokens].tolist() == list(positions)
        assert attention.slot_mapping[tokens].tolist() == [row.block_ids[p // 4] * 4 + p % 4 for p in positions]
        assert attention.context_lens[index] == positions.stop
        assert attention.block_tables[index, : len(row.block_ids)].tolist() == list(row.block_ids)


@settings(deadline=None)
@given(batches())
def test_rows_come_in_the_order_attention_wants(batch: Batch) -> None:
    attention = InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU).build(batch).attention
    counts = np.diff(attention.query_starts)
    assert attention.num_decode_rows == (counts == 1).sum()
    assert (counts[: attention.num_decode_rows] == 1).all()
    assert (np.diff(attention.context_lens[: attention.num_decode_rows]) >= 0).all()


@settings(deadline=None)
@given(batches())
def test_wanted_hidden_rows_point_at_the_right_tokens(batch: Batch) -> None:
    inputs = InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU).build(batch)
    assert inputs.sample_rows.tolist() == [i for i, row in enumerate(batch.rows) if row.sample]
    assert inputs.sample_slots.tolist() == [row.slot for row in batch.rows if row.sample]
    all_hidden = torch.arange(batch.num_tokens)
    hidden_rows = all_hidden if inputs.sample_hidden is None else inputs.sample_hidden
    for index, hidden in zip(inputs.sample_rows, hidden_rows.tolist(), strict=True):
        row = batch.rows[index]
        assert inputs.token_ids[hidden] == row.token_ids[-1]
        assert inputs.positions[hidden] == row.start + len(row.token_ids) - 1
    assert [part.row for part in inputs.prompt_scores] == [i for i, row in enumerate(batch.rows) if row.prompt_targets]
    for part in inputs.prompt_scores:
        row = batch.rows[part.row]
        assert part.targets == row.prompt_targets
        assert inputs.token_ids[part.first : part.first + len(row.token_ids)].tolist() == list(row.token_ids)
        assert inputs.positions[part.first] == row.start


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=9))
def test_rows_of_one_token_are_laid_out_as_any_others(rows: list[tuple[int, int]]) -> None:
    columns = Columns.of([Row(slot, start, (start % 7,), 0, (), True) for slot, start in rows])
    for short, general in zip(lay_out_singles(columns), lay_out(columns), strict=True):
        assert short.tolist() == general.tolist()


@st.composite
def runs(draw: st.DrawFn) -> list[Batch]:
    """Steps in which rows decode on, blocks of 4 come as they are needed or before, and sometimes something changes."""
    starts = dict(draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, unique_by=lambda p: p[0])))
    known = dict.fromkeys(starts, 0)
    steps = []
    for step in range(draw(st.integers(2, 12))):
        leaving = draw(st.sampled_from([None, None, None, *starts]))
        rows = []
        for slot in [slot for slot in starts if slot != leaving or len(starts) == 1]:
            num_tokens = draw(st.sampled_from([1] * 9 + [3]))
            num_blocks = max(
                known[slot], blocks_for(starts[slot] + num_tokens, 4) + draw(st.sampled_from([0, 0, 0, 1]))
            )
            block_ids = tuple(100 * slot + index for index in range(known[slot], num_blocks))
            token_ids = (draw(st.sampled_from([PENDING, 7, 8])), *[9] * (num_tokens - 1))
            sample, targets = draw(st.sampled_from([(True, ())] * 9 + [(False, ()), (True, (5,))]))
            rows.append(Row(slot, starts[slot], token_ids, known[slot], block_ids, sample, prompt_targets=targets))
            known[slot], starts[slot] = num_blocks, starts[slot] + num_tokens
        steps.append(Batch(step, (), (), tuple(rows)))
    return steps


def told(inputs: StepInputs) -> list[object]:
    attention, hidden = inputs.attention, inputs.sample_hidden
    tensors = (inputs.token_ids, inputs.positions, attention.block_tables, attention.slot_mapping)
    arrays = (attention.query_starts, attention.context_lens, inputs.sample_rows, inputs.sample_slots)
    rest = (attention.num_decode_rows, None if hidden is None else hidden.tolist(), inputs.prompt_scores)
    return [*(each.tolist() for each in (*tensors, *arrays)), *rest, inputs.has_pending]


@settings(deadline=None)
@given(runs())
def test_a_step_taken_on_from_the_one_before_is_laid_out_as_from_its_rows_alone(steps: list[Batch]) -> None:
    taken_on, anew = (InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU) for _ in range(2))
    for batch in steps:
        anew._course = None
        assert told(taken_on.build(batch)) == told(anew.build(batch))


def test_a_course_ends_with_the_context() -> None:
    builder = InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU)
    for start in range(MAX_LEN - 2, MAX_LEN):
        builder.build(Batch(start, (), (), (Row(0, start, (5,), 0, tuple(range(13)), True),)))
    with pytest.raises(ValueError, match=r"50 \+ 1"):
        builder.build(Batch(99, (), (), (Row(0, MAX_LEN, (5,), 13, (), True),)))


def test_a_pending_token_names_its_slot() -> None:
    rows = (Row(2, 4, (PENDING,), 0, (0, 1), True), Row(1, 2, (9,), 0, (2,), True), Row(0, 0, (5, 6), 0, (3,), False))
    builder = InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU)
    inputs = builder.build(Batch(1, (), (), rows))
    assert (inputs.token_ids.tolist(), inputs.has_pending) == ([9, -3, 5, 6], True)
    assert not builder.build(Batch(2, (), (), rows[1:])).has_pending


def test_block_tables_persist_and_change_only_where_told() -> None:
    builder = InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU)

    def table(*rows: Row) -> list[list[int]]:
        return builder.build(Batch(1, (), (), rows)).attention.block_tables.tolist()

    assert table(Row(2, 0, (5,) * 9, 0, (7, 3, 9), False)) == [[7, 3, 9]]
    assert table(Row(2, 9, (5,), 3, (), True)) == [[7, 3, 9]]
    assert table(Row(1, 0, (5,), 0, (4,), True), Row(2, 10, (5,), 1, (8,), True)) == [[4, 0, 0], [7, 8, 9]]
    assert table(Row(2, 12, (5,), 3, (6,), True)) == [[7, 8, 9, 6]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        (
            [Row(0, 0, (1,) * 40, 0, tuple(range(10)), True), Row(1, 0, (1,) * 40, 0, tuple(range(10)), True)],
            "80 tokens",
        ),
        ([Row(6, 0, (1,), 0, (0,), True)], "slot 6"),
        ([Row(-1, 0, (1,), 0, (0,), True)], "slot -1"),
        ([Row(0, 49, (1, 1), 0, tuple(range(13)), True)], "49 \\+ 2"),
    ],
)
def test_what_does_not_fit_is_refused(rows: list[Row], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InputBuilder(MAX_SEQS, MAX_TOKENS, MAX_LEN, 4, CPU).build(Batch(3, (), (), tuple(rows)))
