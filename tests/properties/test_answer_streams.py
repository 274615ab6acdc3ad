"""Random tokens through everything an answer's text passes: detokenizer, stop strings, reasoning, tool calls.

The oracle does it all at once: decode the whole, cut it at the first stop string, give it to a fresh router in one go.
"""

import itertools
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.handle import TokenEvent
from scheduler.request import FinishReason
from server.text.choice import ChoiceText, TextOptions
from server.text.pieces import TextPieces, TextRouter
from server.text.reasoning import compose, reasoning_router
from server.text.tokenizer import Tokenizer
from server.text.tools.dialect import ToolDialect
from server.text.tools.leading import LeadingRouter
from tests.fakes.byte_tokenizer import FIRST_WORD_ID, byte_tokenizer
from tests.fakes.smollm2 import smollm2_tokenizer
from tests.fakes.tool_calls import TOOLS, Answer, dialects
from tests.properties.test_text_streams import CUTS, STOPS, cut, naive

FRAGMENTS = (
    b"<think>", b"</think>", b"\n\n", b"  ", b"<tool_call>", b"</tool_call>", b'{"name": "get_time", "arguments": {}}',
    b'{"name": "get_time", "parameters": {"a": "', b'"}}', b"[TOOL_CALLS]", b"get_time", b"[ARGS]", b"[get_time(",
    b"a='", b"')]", b"<|python_tag|>", b"\xf0\x9f\x8e", b"\x89a", b"\xed\xa0", b"ab", b"; ", b"}}",
)  # fmt: skip
BYTES = byte_tokenizer(FRAGMENTS)

NOISE = st.lists(
    st.one_of(st.integers(0, 258), st.integers(FIRST_WORD_ID, FIRST_WORD_ID + len(FRAGMENTS) - 1)), max_size=30
)
DIALECTS = st.sampled_from(dialects())
Maker = Callable[[], TextRouter]


def router_maker(dialect: ToolDialect, parser: str, starts_inside: bool, is_either: bool) -> Maker:
    """Fresh routers whose call ids are the same numbers each time."""

    def make() -> TextRouter:
        numbers = itertools.count()
        calls = dialect.router(TOOLS, new_id=lambda: f"call_{next(numbers)}")
        if is_either and dialect.opening:
            calls = LeadingRouter(dialect.opening, calls)
        return compose(reasoning_router(parser, starts_inside), calls)

    return make


def at_once(text: str, make: Maker) -> tuple[Answer, str]:
    router = make()
    return joined([router.push(text), router.flush()])


def joined(pieces: Sequence[TextPieces]) -> tuple[Answer, str]:
    """The content and calls as a client joins them, and the reasoning."""
    answer, reasoning = Answer(), ""
    for piece in pieces:
        answer.take(piece)
        reasoning += piece.reasoning
    return answer, reasoning


def streamed(
    tokenizer: Tokenizer, ids: list[int], options: TextOptions, make: Maker, parts: list[slice]
) -> tuple[Answer, str, str | None]:
    choice = ChoiceText(tokenizer, options, make())
    pieces, stop_string = [], None
    for part in [*parts, None]:
        event = TokenEvent(0, tuple(ids[part]) if part else (), (), None if part else FinishReason.LENGTH)
        delta = choice.push(event)
        pieces.append(delta.pieces)
        stop_string = stop_string or delta.stop_string
    return (*joined(pieces), stop_string)


@settings(deadline=None, max_examples=400)
@given(
    ids=NOISE,
    stops=st.one_of(STOPS, st.lists(st.sampled_from(["\ufffd", "<", "get_time", "}}", "ab"]), max_size=2)),
    cuts=CUTS,
    dialect=DIALECTS,
    parser=st.sampled_from(["think", "none"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_a_stream_says_what_the_whole_text_says(
    ids: list[int], stops: list[str], cuts: list[int], dialect: ToolDialect, parser: str, flags: tuple[bool, ...]
) -> None:
    include, skip, starts_inside, is_either = flags
    options = TextOptions(stops=tuple(stops), include_stop=include, skip_special_tokens=skip)
    make = router_maker(dialect, parser, starts_inside, is_either)
    shown, matched = naive(BYTES.decode(ids, skip_special_tokens=skip), stops, include)
    assert streamed(BYTES, ids, options, make, cut(cuts, len(ids))) == (*at_once(shown, make), matched)


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), cuts=CUTS, dialect=DIALECTS)
def test_any_tokens_of_a_real_vocabulary(ids: list[int], cuts: list[int], dialect: ToolDialect) -> None:
    tokenizer = smollm2_tokenizer()
    options = TextOptions(stops=(" the", "\n\n"), skip_special_tokens=False)
    make = router_maker(dialect, "think", False, False)
    shown, matched = naive(tokenizer.decode(ids, skip_special_tokens=False), list(options.stops), False)
    assert streamed(tokenizer, ids, options, make, cut(cuts, len(ids))) == (*at_once(shown, make), matched)


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=60), cuts=CUTS)
def test_any_bytes_as_text_and_back(data: bytes, cuts: list[int]) -> None:
    """Bytes -> ids -> text: what is UTF-8 survives, what is not becomes U+FFFD, and nothing else happens."""
    text = data.decode("utf-8", errors="replace")
    want = data.decode("utf-8", errors="ignore")
    assert BYTES.decode(BYTES.encode(want, add_special_tokens=False), skip_special_tokens=False) == want
    smollm2_tokenizer().encode(want)  # lacks some control characters, but takes them
    make = router_maker(dialects()[0], "none", False, False)
    got, reasoning, _ = streamed(BYTES, list(data), TextOptions(), make, cut(cuts, len(data)))
    assert reasoning == ""
    if b"<" not in data:
        assert got.content == text
