import json

import pytest

from server.text.tools.messages import arguments_object, text_of
from server.text.tools.registry import detect_dialect, dialect_names, select_dialect
from tests.fakes.smollm2 import smollm2_metadata
from tests.fakes.tool_calls import TOOLS, WEATHER

CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "東京"}'}}
HISTORY = [
    {"role": "user", "content": "Weather in Tokyo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]

TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}",
    "llama3_json": "{% if tools %}{% endif %}{{ '<|python_tag|>' }}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [",
    "mistral_args": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]f[ARGS]",
    "pythonic": "{% if tools %}[func_name1(params_name1=params_value1)] <|python_tag|>{% endif %}",
    "default": "{{ messages }} <tool_call>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_the_dialect(name: str) -> None:
    assert detect_dialect(TEMPLATES[name]) == name
    assert select_dialect("auto", TEMPLATES[name]).name == name


def test_templates_without_tools_get_the_default() -> None:
    assert select_dialect("auto", None).name == "default"
    assert select_dialect("auto", smollm2_metadata()["tokenizer.chat_template"]).name == "default"
    assert detect_dialect("{{ tools }} <tool_call>\n<function=f>") == "default"


def test_a_name_overrides_the_template() -> None:
    for name in dialect_names():
        assert select_dialect(name, TEMPLATES["hermes"]).name == name
    with pytest.raises(ValueError, match="klingon"):
        select_dialect("klingon", None)


@pytest.mark.parametrize("name", [name for name in dialect_names() if name != "default"])
def test_templates_that_know_tools_get_arguments_as_objects(name: str) -> None:
    dialect = select_dialect(name, None)
    rendered = dialect.render_messages(HISTORY, TOOLS)
    assert not dialect.needs_prompt
    assert [message["role"] for message in rendered] == ["user", "assistant", "tool"]
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == {"city": "東京"}
    assert HISTORY[1]["tool_calls"] == [CALL], "the given messages stay as they were"


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
def test_mistral_ids_have_nine_letters_and_still_match(name: str) -> None:
    rendered = select_dialect(name, None).render_messages(HISTORY, TOOLS)
    assert rendered[1]["tool_calls"][0]["id"] == rendered[2]["tool_call_id"]
    assert len(rendered[2]["tool_call_id"]) == 9
    kept = [{"role": "tool", "tool_call_id": "abcDEF123", "content": "x"}]
    assert select_dialect(name, None).render_messages(kept, ()) == kept


def test_the_default_writes_tools_into_the_system_message() -> None:
    dialect = select_dialect("default", None)
    assert dialect.needs_prompt
    own = dialect.render_messages([{"role": "system", "content": "Be brief."}, *HISTORY], TOOLS)
    added = dialect.render_messages(HISTORY, TOOLS)
    assert own[0]["content"].startswith("Be brief.\n\n")
    assert added[0]["role"] == "system"
    assert len(own) == len(added) == len(HISTORY) + 1
    for messages in (own, added):
        line = next(line for line in messages[0]["content"].splitlines() if "get_weather" in line)
        assert json.loads(line) == WEATHER.as_openai()


def test_the_default_writes_calls_and_results_as_text_also_without_tools() -> None:
    rendered = select_dialect("default", None).render_messages(HISTORY, ())
    assert rendered == [
        {"role": "user", "content": "Weather in Tokyo?"},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"},
    ]


def test_the_default_keeps_content_beside_calls_and_every_message() -> None:
    messages = [
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]},
        {"role": "tool", "content": "warm"},
    ]
    rendered = select_dialect("default", None).render_messages(messages, ())
    assert [message["role"] for message in rendered] == ["assistant", "user", "user"]
    assert rendered[0]["content"].startswith("I look.\n<tool_call>")
    assert rendered[0]["content"].count("<tool_call>") == 2
    assert "\nsunny\n" in rendered[1]["content"]


def test_odd_arguments_stay_what_they_are() -> None:
    assert arguments_object('{"a": 1}') == {"a": 1}
    assert arguments_object("") == {}
    assert arguments_object("[1]") == "[1]"
    assert arguments_object("oops") == "oops"
    assert arguments_object({"a": 1}) == {"a": 1}
    assert text_of(None) == ""
