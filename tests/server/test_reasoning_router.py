import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.pieces import TextPieces, TextRouter
from server.text.reasoning import (
    compose,
    detect_reasoning,
    prompt_opens_reasoning,
    reasoning_parsers,
    reasoning_prefix,
    reasoning_router,
)


def run(router: TextRouter, *parts: str) -> tuple[str, str]:
    pieces = TextPieces()
    for part in parts:
        pieces += router.push(part)
    pieces += router.flush()
    assert not pieces.tool_calls
    return pieces.reasoning, pieces.content


@pytest.mark.parametrize(
    ("starts_inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "hm\n", "yes"),
        (False, "\n<think>hm</think>yes", "hm", "yes"),
        (True, "hm</think>\n\nyes", "hm", "yes"),
        (True, "\nhm</think>yes", "hm", "yes"),
        (False, "no thought", "", "no thought"),
        (False, "  indented", "", "  indented"),
        (False, "see <think>x</think>", "", "see <think>x</think>"),
        (False, "<think></think>yes", "", "yes"),
        (False, "<think>\n\n</think>\n\nyes", "", "yes"),
        (False, "<think>a</think>b</think>c<think>", "a", "b</think>c<think>"),
        (True, "never closed", "never closed", ""),
        (True, "half closed </thi", "half closed </thi", ""),
        (False, "<think>a < b </ c</think> d", "a < b </ c", " d"),
        (False, "<thi", "", "<thi"),
        (False, "<thinking>x", "", "<thinking>x"),
        (False, "", "", ""),
        (True, "", "", ""),
    ],
)
def test_think_sections(starts_inside: bool, text: str, reasoning: str, content: str) -> None:
    assert run(reasoning_router("think", starts_inside), text) == (reasoning, content)
    assert run(reasoning_router("think", starts_inside), *text) == (reasoning, content)


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", "</", "think>", " ", "é"]), max_size=12)


@settings(deadline=None, max_examples=300)
@given(parts=PARTS, starts_inside=st.booleans(), data=st.data())
def test_cuts_do_not_matter(parts: list[str], starts_inside: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = run(reasoning_router("think", starts_inside), text)
    assert run(reasoning_router("think", starts_inside), *pieces) == whole


def test_reasoning_streams_as_it_comes() -> None:
    router = reasoning_router("think", starts_inside=True)
    assert router.push("step one") == TextPieces(reasoning="step one")
    assert router.push(" </th") == TextPieces(reasoning=" ")
    assert router.push("ink>") == TextPieces()
    assert router.push("answer") == TextPieces(content="answer")


def test_none_is_all_content() -> None:
    assert run(reasoning_router("none", False), "<think>x</think>y") == ("", "<think>x</think>y")


def test_unknown_parsers_are_named() -> None:
    with pytest.raises(ValueError, match="deepthought"):
        reasoning_router("deepthought", False)
    for parser in reasoning_parsers():
        reasoning_router(parser, False)


def test_detection() -> None:
    assert detect_reasoning("{% if x %}</think>{% endif %}") == "think"
    assert detect_reasoning("{{ messages }}") == "none"
    assert detect_reasoning(None) == "none"


def test_the_prompt_may_have_opened_the_section() -> None:
    assert prompt_opens_reasoning("think", "<|assistant|><think>\n")
    assert not prompt_opens_reasoning("think", "<think>\n\n</think>\n\n")
    assert not prompt_opens_reasoning("think", "use <think> tags<|assistant|>")
    assert not prompt_opens_reasoning("none", "<think>")
    assert reasoning_prefix("none", False) is None


def test_composed_routers_pass_content_on() -> None:
    class Upper:
        def push(self, text: str) -> TextPieces:
            return TextPieces(content=text.upper())

        def flush(self) -> TextPieces:
            return TextPieces(content="!")

    assert run(compose(reasoning_router("think", True), Upper()), "why</think>so") == ("why", "SO!")
    assert run(compose(reasoning_router("think", False), Upper()), "<thi") == ("", "<THI!")
