"""The gate: what counts as the same answer, what rounding may change, and what stops everything."""

import pytest

from bench.gate import GateFailed, Step, Verdict, check, compare_ids, compare_text, is_exact
from bench.targets import Served

WORDS = {1: "The", 2: " cat", 3: " dog", 4: " sat", 5: " cats", 6: "\ufffd", 7: "é"}
STEPS = [Step((1, 7), (9.0, 1.0), 2.0), Step((2, 3), (5.0, 4.0), 2.0), Step((4, 2), (8.0, 7.0), 2.0)]


def decode(ids):
    return "".join(WORDS[token_id] for token_id in ids)


def test_equal_ids_are_equal():
    assert compare_ids([1, 2, 4], STEPS) == Verdict(3, 3, 0.0)


def test_the_first_other_token_is_judged_by_the_references_own_logits():
    assert compare_ids([1, 3, 4], STEPS) == Verdict(1, 3, 0.5)


def test_a_token_that_the_reference_does_not_rank_is_at_least_as_far_as_the_last_it_does():
    assert compare_ids([5, 2, 4], STEPS) == Verdict(0, 3, 4.0)


def test_a_short_answer_is_no_match():
    assert compare_ids([1, 2], STEPS).gap == float("inf")


def test_text_is_compared_token_by_token():
    assert compare_text("The cat sat", STEPS, decode) == Verdict(3, 3, 0.0)
    assert compare_text("The dog ran", STEPS, decode) == Verdict(1, 3, 0.5)
    assert compare_text("A", STEPS, decode) == Verdict(0, 3, 4.0)


def test_half_a_character_at_the_end_of_a_text_is_no_difference():
    steps = [STEPS[0], Step((6, 3), (5.0, 4.0), 2.0)]
    assert compare_text("Theé", steps, decode) == Verdict(2, 2, 0.0)


class Told:
    """A target with a fixed answer."""

    def __init__(self, token_ids, text="", dtype="float32", how=""):
        self.name = "told"
        self.served = Served(dtype=dtype, how=how)
        self._answer = token_ids, text

    def greedy(self, prompt_ids, num_out):
        return self._answer


def test_float32_must_be_exact_and_others_may_flip_what_is_close():
    close = [STEPS[0], Step((2, 3), (5.0, 4.8), 2.0), STEPS[2]]
    with pytest.raises(GateFailed, match="told: greedy tokens differ"):
        check(Told([1, 3, 4]), [[1]], [close], decode)
    [verdict] = check(Told([1, 3, 4], dtype="bfloat16"), [[1]], [close], decode)
    assert verdict.num_equal == 1
    [verdict] = check(Told(None, "The dog", dtype=None), [[1]], [close], decode)
    assert "1/3" in str(verdict)
    with pytest.raises(GateFailed):
        check(Told([1, 3, 4], dtype="bfloat16"), [[1]], [STEPS], decode)


def test_only_plain_float32_is_exact():
    assert is_exact(Told([]))
    assert not is_exact(Told([], how="quire serve --quantization int8"))
    assert not is_exact(Told([], dtype=None))
