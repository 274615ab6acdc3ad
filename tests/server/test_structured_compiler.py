import asyncio
import json
import threading

import numpy as np
import pytest

from server.text.grammar_spec import EmbeddedSchema, Marker
from server.text.reasoning import reasoning_prefix
from server.text.structured import (
    NUM_THREADS,
    CompilerBusy,
    GrammarConstraint,
    GrammarError,
    GrammarSpec,
    StructuredCompiler,
)
from tests.fakes.byte_tokenizer import CALL_ID, EOS_ID, byte_tokenizer
from tests.fakes.grammar_walk import STOP_IDS, VOCAB_SIZE, accepts, allowed_ids, allows_start, compiled, walk
from tests.fakes.smollm2 import smollm2_tokenizer


def mask_of(constraint: GrammarConstraint, text: str, vocab_size: int = VOCAB_SIZE) -> list[int]:
    state = constraint.start()
    assert state.accept(smollm2_tokenizer().encode(text, add_special_tokens=False))
    words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    state.fill_mask(words)
    return list(map(int, allowed_ids(words)))


# ---------------------------------------------------------------- kinds


@pytest.mark.parametrize("seed", range(5))
def test_json_object_is_an_object(seed: int) -> None:
    written = walk(compiled(GrammarSpec.json_object()), seed)
    assert written.ended
    assert isinstance(json.loads(written.text), dict)


@pytest.mark.parametrize("text", ["[1]", "7", '"x"', "", "null", "{}{}", '{"a": 1} or so'])
def test_json_object_is_nothing_else(text: str) -> None:
    assert not accepts(compiled(GrammarSpec.json_object()), text)


def test_regex_matches_the_whole() -> None:
    constraint = compiled(GrammarSpec.regex("[0-9]{3}(-[a-z]+)?"))
    assert accepts(constraint, "123")
    assert accepts(constraint, "123-ab")
    assert not accepts(constraint, "1234")
    assert not accepts(constraint, "123-")


def test_choice_takes_texts_literally() -> None:
    texts = ["a", "ab", 'q"u\\o\nte', "東京", ".*", ""]
    constraint = compiled(GrammarSpec.choice(texts))
    assert all(accepts(constraint, text) for text in texts)
    assert not any(accepts(constraint, text) for text in ("abc", "b", "xx"))
    assert {walk(constraint, seed).text for seed in range(30)} <= set(texts)


def test_grammars_in_either_notation() -> None:
    lark = compiled(GrammarSpec.grammar('start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[A-Z][a-z]+/'))
    gbnf = compiled(
        GrammarSpec.grammar('root ::= greeting " " name\ngreeting ::= "hi" | "hello"\nname ::= [A-Z] [a-z]+')
    )
    for constraint in (lark, gbnf):
        assert accepts(constraint, "hello Ada")
        assert not accepts(constraint, "hello ada")


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.regex("(a["),
        GrammarSpec.regex("(?=a)"),
        GrammarSpec.regex("\ud800"),
        GrammarSpec.choice([]),
        GrammarSpec.grammar("no grammar at all"),
        GrammarSpec.grammar('start: "a" missing'),
        GrammarSpec.grammar('other ::= "a"'),
        GrammarSpec.grammar("root ::= root"),
        GrammarSpec.grammar("root ::= " + "(" * 5000),
        GrammarSpec.grammar("start: start"),
    ],
)
def test_wrong_grammars_are_refused_in_words(spec: GrammarSpec) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(spec)
    assert 0 < len(caught.value.message) <= 400
    assert "\n" not in caught.value.message


# ---------------------------------------------------------------- states


def test_stop_tokens_exactly_where_the_grammar_may_end() -> None:
    constraint = compiled(GrammarSpec.regex("[0-9]+;?"))
    assert not STOP_IDS & set(mask_of(constraint, ""))
    assert set(mask_of(constraint, "12")) >= STOP_IDS
    assert set(mask_of(constraint, "12;")) == STOP_IDS


def test_is_stopped_when_nothing_may_follow() -> None:
    state = compiled(GrammarSpec.regex("[0-9]+;?")).start()
    tokenizer = smollm2_tokenizer()
    assert state.accept(tokenizer.encode("12"))
    assert not state.is_stopped
    assert state.accept(tokenizer.encode(";"))
    assert state.is_stopped
    assert state.accept([2])
    assert state.is_stopped
    assert state.error is None


def test_a_stop_token_ends_an_answer_that_could_go_on() -> None:
    state = compiled(GrammarSpec.regex("[0-9]+")).start()
    assert state.accept([*smollm2_tokenizer().encode("12"), 0])
    assert state.is_stopped


def test_refused_tokens_leave_an_empty_mask_and_a_reason() -> None:
    state = compiled(GrammarSpec.regex("[0-9]+")).start()
    assert not state.accept(smollm2_tokenizer().encode("x"))
    words = np.full((VOCAB_SIZE + 31) // 32, -1, dtype=np.int32)
    state.fill_mask(words)
    assert not words.any()
    assert state.error
    assert not state.is_stopped


def test_a_stop_token_too_early_is_refused() -> None:
    state = compiled(GrammarSpec.json_object()).start()
    assert state.accept(smollm2_tokenizer().encode("{"))
    assert not state.accept([2])


def test_a_stop_token_that_the_grammar_names_ends_the_answer() -> None:
    state = compiled(GrammarSpec.grammar('start: "ok" <|im_end|>')).start()
    assert state.accept(smollm2_tokenizer().encode("ok"))
    assert not state.is_stopped
    assert state.accept([2])
    assert state.is_stopped
    state = compiled(GrammarSpec.grammar('start: <|im_end|> "ok"')).start()
    with pytest.raises(ValueError, match="goes on after a stop token"):
        state.accept([2])


def test_a_limit_of_the_grammar_engine_is_no_refusal() -> None:
    state = compiled(GrammarSpec.grammar('start: "a" start')).start()
    words = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
    state.fill_mask(words)
    (token_id, *_) = map(int, allowed_ids(words))
    with pytest.raises(ValueError, match="limit"):
        state.accept([token_id])
    assert state.error
    assert not state.is_stopped


def test_states_of_one_constraint_are_independent() -> None:
    constraint = compiled(GrammarSpec.choice(["left", "right"]))
    one, other = constraint.start(), constraint.start()
    assert one.accept(smollm2_tokenizer().encode("left"))
    assert other.accept(smollm2_tokenizer().encode("right"))
    assert one.is_stopped
    assert other.is_stopped
    assert not constraint.start().is_stopped


def test_masks_are_as_wide_as_the_model() -> None:
    vocab_size = VOCAB_SIZE + 100
    wide = StructuredCompiler(smollm2_tokenizer(), vocab_size, STOP_IDS)
    constraint = asyncio.run(wide.compile(GrammarSpec.regex("(.|\n)*")))
    ids = mask_of(constraint, "", vocab_size)
    assert max(ids) < VOCAB_SIZE
    assert len(ids) > VOCAB_SIZE - 200


def test_text_never_allows_control_tokens() -> None:
    ids = mask_of(compiled(GrammarSpec.regex("(.|\n)*")), "")
    assert smollm2_tokenizer().special_ids & set(ids) == STOP_IDS


def test_a_compiler_needs_a_way_to_stop() -> None:
    with pytest.raises(ValueError, match="stop token"):
        StructuredCompiler(smollm2_tokenizer(), VOCAB_SIZE, frozenset({VOCAB_SIZE}))


# ---------------------------------------------------------------- structures and reasoning


def test_embedded_schemas_and_markers() -> None:
    spec = GrammarSpec(
        "structural",
        "start: open args close",
        (EmbeddedSchema("args", '{"type": "object", "properties": {"a": {"type": "integer"}}}', "tools.0"),),
        (Marker("open", "<call>"), Marker("close", "</call>")),
    )
    constraint = compiled(spec)
    assert accepts(constraint, '<call>{"a": 1}</call>')
    assert not accepts(constraint, '<call>{"a": "x"}</call>')
    assert not accepts(constraint, '<call>{"a":  1}</call>')


def test_embedded_schemas_are_checked_under_their_own_name() -> None:
    spec = GrammarSpec("structural", "start: args", (EmbeddedSchema("args", '{"not": {}}', "tools.3"),))
    with pytest.raises(GrammarError) as caught:
        compiled(spec)
    assert (caught.value.param, caught.value.path) == ("tools.3", "not")


def test_a_marker_that_is_a_control_token_is_that_token() -> None:
    tokenizer = byte_tokenizer()
    compiler = StructuredCompiler(tokenizer, tokenizer.vocab_size, frozenset({EOS_ID}))
    spec = GrammarSpec("structural", 'start: open_lead "x"', markers=(Marker("open", "<|call|>"),))
    constraint = asyncio.run(compiler.compile(spec))
    assert constraint.start().accept([*b"free text ", CALL_ID, *b"x", EOS_ID])
    assert not constraint.start().accept([*b"free text ", CALL_ID, *b"y"])
    assert not constraint.start().accept([*b"x", EOS_ID])


@pytest.mark.parametrize("spec", [GrammarSpec.json_object(), GrammarSpec.regex("[{]}"), GrammarSpec.choice(["{}"])])
def test_reasoning_comes_before_the_grammar(spec: GrammarSpec) -> None:
    prefix = reasoning_prefix("think", True)
    assert prefix is not None
    constraint = compiled(spec.after_reasoning(prefix))
    assert accepts(constraint, 'Hm. {"a": what?\n</think>\n\n{}')
    assert accepts(constraint, "</think>{}")
    assert not accepts(constraint, "Hm.{}")
    assert not allows_start(constraint, "Hm.</think>\n\nSure")


def test_reasoning_that_may_be_left_out() -> None:
    prefix = reasoning_prefix("think", False)
    assert prefix is not None
    constraint = compiled(GrammarSpec.json_object().after_reasoning(prefix))
    assert accepts(constraint, "{}")
    assert accepts(constraint, "<think>Hm.</think>{}")
    assert not allows_start(constraint, "Sure")


# ---------------------------------------------------------------- compiling


def small_compiler(**options: float) -> StructuredCompiler:
    tokenizer = byte_tokenizer()
    return StructuredCompiler(tokenizer, tokenizer.vocab_size, frozenset({EOS_ID}), **options)  # type: ignore[arg-type]  # mixed numbers


async def test_equal_specs_share_one_constraint() -> None:
    compiler = small_compiler()
    first, second = await asyncio.gather(
        compiler.compile(GrammarSpec.regex("a+", param="one")), compiler.compile(GrammarSpec.regex("a+", param="two"))
    )
    assert first is second
    assert await compiler.compile(GrammarSpec.regex("a+")) is first
    assert await compiler.compile(GrammarSpec.regex("b+")) is not first


async def test_the_least_recently_used_leaves_the_cache() -> None:
    compiler = small_compiler(cache_size=2)
    specs = [GrammarSpec.regex(letter) for letter in "abc"]
    a, b = [await compiler.compile(spec) for spec in specs[:2]]
    assert await compiler.compile(specs[0]) is a
    await compiler.compile(specs[2])
    assert await compiler.compile(specs[0]) is a
    assert await compiler.compile(specs[1]) is not b


async def test_each_caller_hears_of_its_own_field() -> None:
    compiler = small_compiler()
    specs = [GrammarSpec.regex("(", param=param) for param in ("one", "two")]
    errors = await asyncio.gather(*map(compiler.compile, specs), return_exceptions=True)
    assert [error.param for error in errors if isinstance(error, GrammarError)] == ["one", "two"]


async def test_size_is_bounded() -> None:
    compiler = small_compiler(max_schema_bytes=100)
    with pytest.raises(GrammarError, match="larger than 100 bytes"):
        await compiler.compile(GrammarSpec.json_schema({"enum": ["x" * 100]}))


class SlowCompiler(StructuredCompiler):
    """One that compiles only when told so."""

    def compile_now(self, spec: GrammarSpec) -> GrammarConstraint:
        self.go.wait(10)
        return super().compile_now(spec)

    go: threading.Event


def slow_compiler(timeout_s: float) -> SlowCompiler:
    tokenizer = byte_tokenizer()
    compiler = SlowCompiler(tokenizer, tokenizer.vocab_size, frozenset({EOS_ID}), timeout_s=timeout_s)
    compiler.go = threading.Event()
    return compiler


async def test_time_is_bounded_and_a_failure_is_not_kept() -> None:
    compiler = slow_compiler(0.01)
    with pytest.raises(GrammarError, match="longer than"):
        await compiler.compile(GrammarSpec.regex("a"))
    compiler.go.set()
    compiler._timeout_s = 10.0
    await compiler.compile(GrammarSpec.regex("a"))


async def test_waiting_for_a_thread_is_not_the_grammars_fault() -> None:
    compiler = slow_compiler(0.05)
    slow = [asyncio.create_task(compiler.compile(GrammarSpec.regex(f"{n}"))) for n in range(NUM_THREADS)]
    while not compiler._threads.locked():  # noqa: ASYNC110  a semaphore has no event to wait for
        await asyncio.sleep(0)
    with pytest.raises(CompilerBusy) as caught:
        await compiler.compile(GrammarSpec.regex("a"))
    assert caught.value.num_pending >= 1
    given_up = await asyncio.gather(*slow, return_exceptions=True)
    assert [type(error) for error in given_up] == [GrammarError] * NUM_THREADS
    with pytest.raises(CompilerBusy):  # their threads are still at it
        await compiler.compile(GrammarSpec.regex("a"))
    compiler.go.set()
    compiler._timeout_s = 10.0
    await compiler.compile(GrammarSpec.regex("a"))


async def test_the_event_loop_runs_on_and_a_cancelled_caller_does_not_harm_another() -> None:
    compiler = slow_compiler(10)
    spec = GrammarSpec.regex("a")
    first, second = asyncio.create_task(compiler.compile(spec)), asyncio.create_task(compiler.compile(spec))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert not second.done()
    compiler.go.set()
    assert (await second).start().accept([*b"a", EOS_ID])
    assert first.cancelled()
