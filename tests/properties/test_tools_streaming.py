"""However the text of an answer is cut, a tool-call router gives the same answer; and never an exception."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.tools.dialect import ToolDialect
from tests.fakes.tool_calls import dialects, read

DIALECTS = st.sampled_from(dialects())

FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
        '{"name": "get_time", "arguments": {"a": 1}}', '{"name": "get_time", "parameters": ', '"arguments": ',
        '"name": "get_time"', '"get_weather"', "get_time", "get_time(", "a=1", "nobody", "{", "}", "[", "]", "(", ")",
        ";", ",", ":", '"', "'", "\\", "\n", " ", "null", "1", "-", "é", "東京", "🙂", "<", "text",
        '{"a": "</tool_call>"}',
    ]
)  # fmt: skip
NOISE = st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=14).map("".join)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", "}]", '"', "\\", "[TOOL_CALLS]", "); [", "'"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)


def write(dialect: ToolDialect, calls: list[dict[str, object]], ascii_only: bool) -> str:
    texts = [json.dumps(call, ensure_ascii=ascii_only) for call in calls]
    match dialect.name:
        case "mistral":
            return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "get_time", "arguments": {text}}}' for text in texts) + "]"
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]get_time[ARGS]{text}" for text in texts)
        case "llama3_json":
            return "; ".join(f'{{"name": "get_time", "parameters": {text}}}' for text in texts)
        case "pythonic":
            return "[" + ", ".join(f"get_time(**{call!r})" for call in calls) + "]"
        case _:
            return "\n".join(
                f'<tool_call>\n{{"name": "get_time", "arguments": {text}}}\n</tool_call>' for text in texts
            )


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(deadline=None, max_examples=250)
@given(dialect=DIALECTS, text=NOISE, data=st.data())
def test_cuts_of_any_text_do_not_matter(dialect: ToolDialect, text: str, data: st.DataObject) -> None:
    whole = read(dialect, [text])
    assert read(dialect, cut(text, data)) == whole
    assert read(dialect, text) == whole


@settings(deadline=None, max_examples=120)
@given(dialect=DIALECTS, calls=st.lists(ARGUMENTS, min_size=1, max_size=3), ascii_only=st.booleans(), data=st.data())
def test_calls_come_back_as_they_were_written(
    dialect: ToolDialect, calls: list[dict[str, object]], ascii_only: bool, data: st.DataObject
) -> None:
    text = write(dialect, calls, ascii_only)
    answer = read(dialect, cut(text, data))
    assert [json.loads(arguments) for _, arguments in answer.named_arguments] == calls
    assert answer.content == ""
    if dialect.name != "pythonic":
        assert all(arguments in text for _, arguments in answer.named_arguments)


@settings(deadline=None, max_examples=120)
@given(dialect=DIALECTS, calls=st.lists(ARGUMENTS, min_size=1, max_size=2), data=st.data())
def test_an_answer_cut_short_keeps_what_was_said(
    dialect: ToolDialect, calls: list[dict[str, object]], data: st.DataObject
) -> None:
    text = write(dialect, calls, False)
    end = data.draw(st.integers(0, len(text)))
    answer, whole = read(dialect, cut(text[:end], data)), read(dialect, [text])
    for mine, full in zip(answer.named_arguments, whole.named_arguments, strict=False):
        assert mine[0] == full[0]
        assert full[1].startswith(mine[1])


@settings(deadline=None, max_examples=80)
@given(dialect=DIALECTS, text=NOISE)
def test_nothing_but_white_space_is_lost_without_calls(dialect: ToolDialect, text: str) -> None:
    answer = read(dialect, [text], tools=())
    assert answer.calls == []
    assert answer.content == text
