"""Which tokens may not be drawn: allow lists, bad words, minimum length; bit masks; grammars and their failures."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from engine.batch import RowOutput, SlotStart
from engine.sampling.constraint import Bitmask
from engine.sampling.masks import clear_bits, unpack_bits
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
EOS = 0


def falling(vocab: int) -> torch.Tensor:
    """[1, vocab] logits that prefer low ids."""
    return -torch.arange(vocab, dtype=torch.float32)[None]


def generate(sampler: Sampler, steps: int, logits: torch.Tensor, slot: int = 0) -> list[RowOutput]:
    sampled = []
    for _ in range(steps):
        sampler.begin([slot])
        sampled += sampler.sample([slot], logits.clone())
    return sampled


def tokens_of(params: SamplingParams, steps: int, vocab: int = 10, out: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(1, vocab, CPU)
    sampler.start(SlotStart(0, params, 0, (1,), out))
    return [entry.token_ids[0] for entry in generate(sampler, steps, falling(vocab))]


def test_only_allowed_tokens() -> None:
    assert tokens_of(replace(GREEDY, allowed_token_ids=(7, 4, 9)), 2) == [4, 4]


def test_allowed_rows_beside_free_ones() -> None:
    sampler = Sampler(3, 10, CPU)
    for slot, allowed in enumerate([None, (3, 5), (9,)]):
        sampler.start(SlotStart(slot, replace(GREEDY, allowed_token_ids=allowed), 0, (1,)))
    assert [entry.token_ids[0] for entry in sampler.sample([2, 0, 1], falling(10).repeat(3, 1))] == [9, 0, 3]


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert tokens_of(replace(GREEDY, bad_words_ids=((0,), (1,))), 3) == [2, 2, 2]


def test_a_bad_word_of_several_tokens_loses_its_last_only_after_the_others() -> None:
    """0 0 0 is banned, so after two zeros comes a one, and then zeros again."""
    assert tokens_of(replace(GREEDY, bad_words_ids=((0, 0, 0),)), 7) == [0, 0, 1, 0, 0, 1, 0]


def test_bad_words_are_matched_against_the_output_not_the_prompt() -> None:
    params = replace(GREEDY, bad_words_ids=((1, 0),))
    assert tokens_of(params, 1) == [0]  # the prompt ends in 1
    assert tokens_of(params, 1, out=(1,)) == [1]
    assert tokens_of(params, 1, out=(1, 5)) == [0]


def test_a_longer_bad_word_than_the_output_does_nothing_yet() -> None:
    assert tokens_of(replace(GREEDY, bad_words_ids=((0, 0, 0, 0),)), 4) == [0, 0, 0, 1]


def test_stop_tokens_wait_for_the_minimum_length() -> None:
    params = replace(GREEDY, min_tokens=3, stop_token_ids=frozenset((0, 1, 999)))
    assert tokens_of(params, 5) == [2, 2, 2, 0, 0]
    assert tokens_of(params, 2, out=(5, 5)) == [2, 0]


def test_minimum_length_without_stop_tokens_changes_nothing() -> None:
    assert tokens_of(replace(GREEDY, min_tokens=3), 1) == [0]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_bits_are_unpacked_in_order(vocab: int) -> None:
    wanted = np.random.default_rng(vocab).random((3, vocab)) < 0.5
    padded = np.zeros((3, -(-vocab // 32) * 32), dtype=np.uint8)
    padded[:, :vocab] = wanted
    words = np.packbits(padded, axis=-1, bitorder="little").view(np.int32)
    assert (unpack_bits(torch.from_numpy(words), vocab).numpy() == wanted).all()


def test_clearing_bits_leaves_the_others_and_the_original() -> None:
    words = np.full(3, -1, dtype=np.int32)
    cleared = clear_bits(words, np.array([0, 31, 33, 33, 95]))
    allowed = unpack_bits(torch.from_numpy(cleared[None]), 96)[0]
    assert (~allowed).nonzero().squeeze(-1).tolist() == [0, 31, 33, 95]
    assert (words == -1).all()


@dataclass
class ScriptState:
    """Allows at each position the listed tokens; stopped after the last position."""

    script: tuple[tuple[int, ...], ...]
    threads: set[str] = field(default_factory=set)
    at: int = 0
    fail_at: int | None = None
    error: str | None = None

    def fill_mask(self, out: Bitmask) -> None:
        assert not out.any()
        self.threads.add(threading.current_thread().name)
        if self.at == self.fail_at:
            raise ValueError("the parser gave up")
        for token_id in self.script[self.at]:
            if token_id >> 5 < len(out):
                out.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if self.is_stopped or token_id not in self.script[self.at]:
                return False
            self.at += 1
        return True

    @property
    def is_stopped(self) -> bool:
        return self.at == len(self.script)


@dataclass
class Script:
    """A constraint of `ScriptState`s, kept for a look afterwards."""

    script: tuple[tuple[int, ...], ...]
    fail_at: int | None = None
    fail_start: bool = False
    states: list[ScriptState] = field(default_factory=list)

    def start(self) -> ScriptState:
        if self.fail_start:
            raise RuntimeError("no memory for the grammar")
        self.states.append(ScriptState(self.script, fail_at=self.fail_at))
        return self.states[-1]


def constrained(script: Script, params: SamplingParams = GREEDY, out: tuple[int, ...] = ()) -> Sampler:
    sampler = Sampler(2, 40, CPU)
    sampler.start(SlotStart(0, params, 0, (1,), out, script))
    return sampler


def test_a_grammar_leads_and_stops() -> None:
    sampler = constrained(Script(((5, 39), (33,), (EOS,))))
    sampled = generate(sampler, 3, falling(40))
    assert [(entry.token_ids[0], entry.stopped) for entry in sampled] == [(5, False), (33, False), (EOS, True)]
    sampler.close()


def test_masks_are_filled_on_the_side_thread_in_one_task() -> None:
    script = Script(((5,), (6,)))
    sampler = Sampler(4, 40, CPU)
    for slot in range(4):
        sampler.start(SlotStart(slot, GREEDY, 0, (1,), (), script if slot != 2 else None))
    for _ in range(2):
        sampler.begin([0, 1, 2, 3])
        sampled = sampler.sample([3, 2, 1, 0], falling(40).repeat(4, 1))
    assert [entry.token_ids[0] for entry in sampled] == [6, 0, 6, 6]
    assert len(set().union(*(state.threads for state in script.states))) == 1
    assert threading.main_thread().name not in script.states[0].threads
    sampler.close()


def test_sampling_without_begin_still_obeys_the_grammar() -> None:
    sampler = constrained(Script(((5,), (7,))))
    assert [sampler.sample([0], falling(40))[0].token_ids[0] for _ in range(2)] == [5, 7]


def test_masks_begun_for_a_step_that_failed_are_not_used_later() -> None:
    sampler = constrained(Script(((5,), (7,))))
    sampler.begin([0])  # the step fails before anything is sampled
    sampler.start(SlotStart(0, GREEDY, 0, (1,), (), Script(((9,),))))
    sampler.start(SlotStart(1, GREEDY, 0, (1,), (), Script(((8,),))))
    sampler.begin([1])
    assert [entry.token_ids[0] for entry in sampler.sample([0, 1], falling(40).repeat(2, 1))] == [9, 8]
    sampler.close()


def test_a_preempted_grammar_is_replayed() -> None:
    sampler = constrained(Script(((5,), (6,), (7,))), out=(5, 6))
    assert generate(sampler, 1, falling(40)) == [RowOutput((7,), stopped=True)]
    sampler.close()


def test_tokens_beyond_a_smaller_grammar_vocabulary_are_banned() -> None:
    sampler = Sampler(1, 100, CPU)
    sampler.start(SlotStart(0, GREEDY, 0, (1,), (), Script(((31, 300),))))
    (sampled,) = sampler.sample([0], -falling(100))  # the model prefers high ids
    assert sampled.token_ids[0] == 31


def test_grammar_and_other_masks_act_together() -> None:
    params = replace(GREEDY, bad_words_ids=((5,),), allowed_token_ids=(5, 7, 9))
    assert generate(constrained(Script(((4, 5, 7, 8),)), params), 1, falling(40))[0].token_ids[0] == 7


def test_minimum_length_holds_back_the_end_while_the_grammar_can_go_on() -> None:
    script = Script(((EOS, 5), (EOS, 5), (EOS, 5), (EOS, 5)))
    params = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset((EOS,)))
    sampled = generate(constrained(script, params), 3, falling(40))
    assert [entry.token_ids[0] for entry in sampled] == [5, 5, EOS]


def test_a_complete_grammar_ends_below_the_minimum_length() -> None:
    script = Script(((5,), (EOS,)))
    params = replace(GREEDY, min_tokens=9, stop_token_ids=frozenset((EOS,)))
    sampled = generate(constrained(script, params), 2, falling(40))
    assert [(entry.token_ids[0], entry.error, entry.stopped) for entry in sampled] == [
        (5, None, False),
        (EOS, None, True),
    ]


def test_padding_bits_behind_the_vocabulary_do_not_count_as_a_way_to_go_on() -> None:
    """The grammar's own vocabulary is padded to 64, the model's ends at 40."""
    script = Script(((EOS, 50),))
    params = replace(GREEDY, min_tokens=9, stop_token_ids=frozenset((EOS,)))
    (sampled,) = generate(constrained(script, params), 1, falling(40))
    assert (sampled.token_ids[0], sampled.error) == (EOS, None)


@pytest.mark.parametrize(
    ("script", "reason", "num_good"),
    [
        (Script(((5,), (6,)), fail_at=1), "the parser gave up", 1),
        (Script(((5,),), fail_start=True), "no memory for the grammar", 0),
        (Script(((),)), "no token is left", 0),
    ],
)
def test_a_failing_grammar_fails_its_own_row_only(script: Script, reason: str, num_good: int) -> None:
    sampler = constrained(script)
    sampler.start(SlotStart(1, GREEDY, 0, (1,), (), Script(((8,), (9,)))))
    for step in range(num_good + 1):
        sampler.begin([0, 1])
        failing, fine = sampler.sample([0, 1], falling(40).repeat(2, 1))
        assert (failing.error is None) == (step < num_good)
        assert (fine.token_ids[0], fine.error) == (8 + step, None)
    assert failing.error is not None
    assert reason in failing.error
    sampler.start(SlotStart(0, GREEDY, 0, (1,)))  # the next sequence of the slot is well
    assert sampler.sample([0], falling(40)) == [RowOutput((0,))]
    sampler.close()


def test_a_replay_the_grammar_refuses_fails_the_row() -> None:
    (sampled,) = generate(constrained(Script(((5,), (6,))), out=(7,)), 1, falling(40))
    assert sampled.error is not None
    assert "[7]" in sampled.error


def test_a_broken_state_gives_its_own_reason() -> None:
    script = Script(((5,),))
    sampler = constrained(script)
    script.states[0].error = "too many rows in the parser"
    (sampled,) = generate(sampler, 1, falling(40))
    assert sampled.error is not None
    assert "too many rows in the parser" in sampled.error


def test_grammar_with_sampling_and_logprobs() -> None:
    params = SamplingParams(seed=3, logprobs=1, top_p=0.9)
    (sampled,) = generate(constrained(Script(((30, 31),)), params), 1, falling(40))
    assert sampled.token_ids[0] in (30, 31)
    assert sampled.logprobs
    assert sampled.logprobs[0].top_ids == (0,)  # the raw distribution, before the mask
    assert sampled.logprobs[0].rank == sampled.token_ids[0] + 1
