import json

import pytest

from server.text.pieces import TextPieces, ToolCallDelta
from server.text.tools.registry import select_dialect
from tests.fakes.tool_calls import TOOLS, read

OSLO = '{"city": "Oslo", "days": 3}'
CALLED = [("get_weather", OSLO)]
TIMED = [("get_time", "{}")]


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    (hermes(OSLO), "", CALLED),
    ("Let me look.\n" + hermes(OSLO), "Let me look.", CALLED),
    (hermes(OSLO) + "\n" + hermes("{}", "get_time") + "\n", "", CALLED + TIMED),
    (hermes(OSLO) + "\nDone.", "Done.", CALLED),
    ('<tool_call>{"arguments": ' + OSLO + ', "name": "get_weather"}</tool_call>', "", CALLED),
    ('<tool_call>{"name":"get_weather","parameters":' + OSLO + "}</tool_call>", "", CALLED),
    ('<tool_call>{"name": "get_time"}</tool_call>', "", TIMED),
    ('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", TIMED),
    ('<tool_call>{"name": "get_time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("get_time", '{"a": 1}')]),
    (hermes('{"a": "</tool_call>", "b": {"c": ["}", "\\"{"]}}', "get_time"), "",
     [("get_time", '{"a": "</tool_call>", "b": {"c": ["}", "\\"{"]}}')]),
    ('<tool_call>{"name": "get_weather", "arguments": ' + OSLO + "}", "", CALLED),
    ('<tool_call>{"name": "get_weather", "arguments": ' + OSLO + "}\n</tool", "", CALLED),
    ('<tool_call>{"name": "get_weather", "arguments": ' + OSLO + "</tool_call>", "", CALLED),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Os', "", [("get_weather", '{"city": "Os')]),
    (hermes("{}", "rm_rf"), hermes("{}", "rm_rf"), []),
    (hermes("[1]"), hermes("[1]"), []),
    (hermes("7"), hermes("7"), []),
    (hermes('"no object"'), hermes('"no object"'), []),
    (hermes('"{\\"a\\": \\"\\ud800\\"}"'), hermes('"{\\"a\\": \\"\\ud800\\"}"'), []),
    ("<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
    ('<tool_call>\n{"name": "get_wea', '<tool_call>\n{"name": "get_wea', []),
    ("<tool_call>", "<tool_call>", []),
    ("<tool_c", "<tool_c", []),
    ("a < b <tool_callx> ", "a < b <tool_callx> ", []),
    ("<tool_call> <tool_call>" + hermes(OSLO)[11:], "<tool_call>", CALLED),
    ("  plain  ", "  plain  ", []),
    ("", "", []),
]  # fmt: skip

LLAMA = [
    ('{"name": "get_weather", "parameters": ' + OSLO + "}", "", CALLED),
    (' <|python_tag|>{"name": "get_weather", "parameters": ' + OSLO + "}", "", CALLED),
    ('{"type": "function", "name": "get_weather", "parameters": ' + OSLO + "}", "", CALLED),
    ('{"name": "get_weather", "parameters": ' + OSLO + '}; {"name": "get_time", "parameters": {}}', "", CALLED + TIMED),
    ('{"name": "get_weather", "parameters": ' + OSLO + "};", "", CALLED),
    ('{"name": "get_weather", "parameters": ' + OSLO + "} there", "there", CALLED),
    ('{"answer": 5}', '{"answer": 5}', []),
    ('{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ('Look: {"name": "get_time", "parameters": {}}', 'Look: {"name": "get_time", "parameters": {}}', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|python", "<|python", []),
    ('{"name"', '{"name"', []),
    ("\n", "\n", []),
]

MISTRAL = [
    ('[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + OSLO + "}]", "", CALLED),
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": ' + OSLO + '}, {"name": "get_time"}]', "", CALLED + TIMED),
    ("Sure. [TOOL_CALLS]get_weather[ARGS]" + OSLO, "Sure.", CALLED),
    ("[TOOL_CALLS]get_weather[ARGS]" + OSLO + "[TOOL_CALLS]get_time[ARGS]{}", "", CALLED + TIMED),
    ("[TOOL_CALLS]get_weather" + OSLO, "", CALLED),
    ('[TOOL_CALLS] [{"name": "nobody"}]', '[TOOL_CALLS] [{"name": "nobody"}]', []),
    ("[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]nobody[ARGS]{}", []),
    ("[TOOL_CALLS]get_time[ARG", "[TOOL_CALLS]get_time[ARG", []),
    ("[TOOL_CALLS]get_time[ARGS]7", "[TOOL_CALLS]get_time[ARGS]7", []),
    ("[TOOL_CALLS] [", "[TOOL_CALLS] [", []),
    ("[TOOL_C", "[TOOL_C", []),
    ("[1] a source", "[1] a source", []),
]

PYTHONIC = [
    ('[get_weather(city="Oslo", days=3)]', "", CALLED),
    ('[get_weather(city="Oslo", days=3), get_time()]', "", CALLED + TIMED),
    ("[get_weather(city='Oslo',\n  days=3,)]", "", CALLED),
    ('[get_weather(**{"city": "Oslo", "days": 3})]', "", CALLED),
    ('<|python_start|>[get_weather(city="Oslo", days=3)]<|python_end|>', "", CALLED),
    ("[get_time(a=[1, -2.5, None], b={'c': True}, d=false, e=null, f='\\'(]')]", "",
     [("get_time", '{"a": [1, -2.5, null], "b": {"c": true}, "d": false, "e": null, "f": "\'(]"}')]),
    ('[get_time(a="日本\\n")]', "", [("get_time", '{"a": "日本\\n"}')]),
    ('[get_weather(city="Oslo", days=3)] then', "then", CALLED),
    ("[get_time(), nobody()]", ", nobody()]", TIMED),
    ('[get_weather("Oslo")]', '[get_weather("Oslo")]', []),
    ("[get_time(a=open('x'))]", "[get_time(a=open('x'))]", []),
    ("[get_time(a=1e999)]", "[get_time(a=1e999)]", []),
    ("[get_time(a='\\ud800')]", "[get_time(a='\\ud800')]", []),
    ("[get_time(a={1: 2})]", "[get_time(a={1: 2})]", []),
    ("[get_time(a=(])]", "[get_time(a=(])]", []),
    ("[get_time(a=", "[get_time(a=", []),
    ("[1, 2]", "[1, 2]", []),
    ("[]", "[]", []),
    ("no list", "no list", []),
]  # fmt: skip

CASES = [
    *[("hermes", *case) for case in HERMES],
    *[("default", *case) for case in HERMES],
    *[("llama3_json", *case) for case in LLAMA],
    *[("mistral", *case) for case in MISTRAL],
    *[("mistral_args", *case) for case in MISTRAL],
    *[("pythonic", *case) for case in PYTHONIC],
]


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart(dialect: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for parts in ([text], list(text)):
        answer = read(select_dialect(dialect, None), parts)
        assert answer.named_arguments == calls
        assert answer.content == content


def test_arguments_stream_exactly_as_written() -> None:
    router = select_dialect("hermes", None).router(TOOLS, new_id=lambda: "call_x")
    assert router.push('Well <tool_call>\n{"name": "get_weather", "argu') == TextPieces(content="Well")
    assert router.push('ments": ') == TextPieces()
    assert router.push('{ "city"') == TextPieces(
        tool_calls=(ToolCallDelta(0, "call_x", "get_weather"), ToolCallDelta(0, arguments='{ "city"'))
    )
    assert router.push(' :"O') == TextPieces(tool_calls=(ToolCallDelta(0, arguments=' :"O'),))
    assert router.push('slo"}}\n') == TextPieces(tool_calls=(ToolCallDelta(0, arguments='slo"}'),))
    assert router.push("</tool_call>") == TextPieces()
    assert router.flush() == TextPieces()


def test_what_is_reported_is_always_the_beginning_of_valid_json() -> None:
    answer = read(select_dialect("hermes", None), [hermes('{"a": 1, "b": oops}', "get_time")])
    assert answer.named_arguments == [("get_time", '{"a": 1, "b": ')]
    assert answer.content == "oops}}\n</tool_call>"


def test_very_deep_arguments_do_not_break_anything() -> None:
    deep = "[" * 50_000 + "]" * 50_000
    answer = read(select_dialect("hermes", None), [hermes(f'{{"a": {deep}}}', "get_time")])
    assert len(answer.calls[0][2]) == len(deep) + 7
    assert read(select_dialect("pythonic", None), [f"[get_time(a={deep})]"]).calls == []
    assert (
        read(select_dialect("hermes", None), [f'<tool_call>{{"arguments": {{"a": {deep}}}, "name": "get_time"}}']).calls
        == []
    )


def test_without_tools_everything_is_content() -> None:
    text = hermes(OSLO)
    assert read(select_dialect("hermes", None), [text], tools=()).content == text


def test_default_ids_are_unique_and_of_the_dialect() -> None:
    text = f"{hermes(OSLO)}\n{hermes(OSLO)}"
    deltas = select_dialect("hermes", None).router(TOOLS).push(text).tool_calls
    ids = [delta.call_id for delta in deltas if delta.call_id]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids)
    mistral = select_dialect("mistral", None).router(TOOLS).push("[TOOL_CALLS]get_time[ARGS]{}").tool_calls
    assert mistral[0].call_id is not None
    assert len(mistral[0].call_id) == 9
    assert mistral[0].call_id.isalnum()


@pytest.mark.parametrize("dialect", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_complete_arguments_are_json_objects(dialect: str) -> None:
    table = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "pythonic": PYTHONIC}[dialect]
    for _, _, calls in table:
        for _, arguments in calls:
            if not arguments.endswith("Os"):
                assert isinstance(json.loads(arguments), dict)
