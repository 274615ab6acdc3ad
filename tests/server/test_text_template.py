from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from server.text.template import ChatTemplate, TemplateError
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.smollm2 import smollm2_metadata, smollm2_tokenizer

CHATML = smollm2_metadata()["tokenizer.chat_template"]

LLAMA3 = """\
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""  # noqa: E501

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Roles must alternate: user, assistant, user, ...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- " " + message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if reasoning %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

PARTS = """\
{% for message in messages %}
{{ message.role }}: {% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}

{% endfor %}
{% if documents %}{{ documents | tojson(indent=2) }}{% endif %}
"""

MACROS = """\
{% macro head(role) %}[{{ role | upper }}]{% endmacro %}
{% macro tree(value, n) %}{% if n > 0 %}({{ tree(value, n - 1) }}){% else %}{{ value }}{% endif %}{% endmacro %}
{% for message in messages -%}
{{ head(message.role) }} {{ tree(message.content, 3) }}
{% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{% for key, value in dict(a=1, b=[1, 2]).items() %}{{ key }}={{ value }};{% endfor %}
{% set d = messages | map(attribute='role') | list %}{{ d | join(',') }}
"""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "  Be <b>brief</b> & kind. "}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": "<&>"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"type": "object"}}}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [user(" Hello\n")],
    "system": [SYSTEM, user("Hi")],
    "turns": [user("a"), assistant("b "), user("c")],
    "four": [user("a"), assistant("b"), user("c"), assistant("d")],
    "calls": [user("1+1?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "2"}],
    "thinking": [user("a"), assistant("b", reasoning_content="because")],
    "inline thinking": [user("a"), assistant("<think>\nx\n</think>\n\nb")],
    "empty": [user(""), assistant("")],
}


def oracle(source: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().hf, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = source
    return tokenizer


def ours(source: str, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(source, byte_tokenizer(), **kwargs)


@pytest.mark.parametrize(
    "source", [CHATML, LLAMA3, MISTRAL, QWEN, MACROS], ids=["chatml", "llama3", "mistral", "qwen", "m"]
)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_renders_as_transformers_does(
    source: str, chat: str, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    kwargs = {"tools": tools, "add_generation_prompt": add_generation_prompt, "enable_thinking": False}
    want, refusal = outcome(oracle(source).apply_chat_template, CHATS[chat], tokenize=False, **kwargs)
    text, error = outcome(ours(source).render, CHATS[chat], **kwargs)
    assert text == want
    assert refusal in error
    assert (want is None) == bool(error)


def outcome(render: Callable[..., str], *args: Any, **kwargs: Any) -> tuple[str | None, str]:
    try:
        return render(*args, **kwargs), ""
    except (TemplateError, jinja2.TemplateError, TypeError) as error:
        return None, str(error)


def test_content_parts_and_documents() -> None:
    messages = [user([{"type": "text", "text": "a"}, {"type": "text", "text": "ü"}])]
    documents = [{"title": "t", "text": "<x>"}]
    want = oracle(PARTS).apply_chat_template(messages, documents=documents, tokenize=False)
    assert ours(PARTS).render(messages, documents=documents, add_generation_prompt=False) == want


def test_arguments_written_as_json_text_reach_the_template_as_an_object() -> None:
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "é": "<&>"}'}}
    template = ours(QWEN)
    want = template.render([user("x"), assistant(None, tool_calls=[CALL])])
    assert template.render([user("x"), assistant(None, tool_calls=[as_text])]) == want
    assert '"arguments": {"a": 1, "é": "<&>"}' in want
    for broken in ("not json", "[1]"):
        message = assistant("", tool_calls=[{"function": {"name": "f", "arguments": broken}}])
        assert f'"arguments": {broken}' in template.render([message])


def test_messages_are_left_as_they_were() -> None:
    messages = [user("q"), assistant("a", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}], name=None)]
    before = repr(messages)
    ours(QWEN).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert repr(messages) == before


def test_kwargs_win_over_special_tokens() -> None:
    assert ours("{{ bos_token }}{{ x }}").render([], x=1) == "<|bos|>1"
    assert ours("{{ bos_token }}").render([], bos_token="B") == "B"
    assert ours("{{ pad_token }}|").render([]) == "|"


def test_date() -> None:
    template = ours("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([]) == "26 Jul 2024"


# ---------------------------------------------------------------- continuing the last message

PREFILLS = [
    "one, two, three,",
    "Here you go:\n",
    "one, two, ",
    "end",
    "q",
    "Count from one to ten.",
    " ",
    "",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "END",
    "{{ messages }}",
]


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
def test_a_prefill_ends_the_prompt_exactly(source: str, prefill: str) -> None:
    messages = [user("Count from one to ten."), assistant(prefill)]
    text = ours(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    opened = ours(source).render([messages[0], assistant("@")], add_generation_prompt=False)
    assert text == opened[: opened.rindex("@")] + (prefill if source != LLAMA3 else prefill.lstrip())


def test_smollm2_prefill_equals_the_open_turn_written_out() -> None:
    template = ChatTemplate(CHATML, smollm2_tokenizer())
    text = template.render(
        [SYSTEM, user("q"), assistant("a b ")], add_generation_prompt=False, continue_final_message=True
    )
    assert text == (
        f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na b "
    )


def test_a_prefill_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    text = ours(PARTS).render([assistant(parts)], add_generation_prompt=False, continue_final_message=True)
    assert text == "assistant: ab "


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        ([user("q")], {}, "role assistant"),
        ([user("q"), assistant(None)], {}, "content"),
        ([], {}, "assistant"),
        ([assistant([{"type": "image"}])], {}, "text"),
        ([assistant("a")], {"add_generation_prompt": True}, "exclude"),
    ],
)
def test_what_cannot_be_continued(messages: list[dict[str, Any]], more: dict[str, Any], message: str) -> None:
    kwargs = {"add_generation_prompt": False, "continue_final_message": True, **more}
    with pytest.raises(TemplateError, match=message):
        ours(CHATML).render(messages, **kwargs)


def test_a_template_that_loses_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(TemplateError, match="does not write out"):
        ours("nothing").render([assistant("a")], add_generation_prompt=False, continue_final_message=True)


# ---------------------------------------------------------------- refusals


def test_the_templates_own_refusal_is_the_message() -> None:
    with pytest.raises(TemplateError, match=r"^Roles must alternate: user, assistant, user, \.\.\.$"):
        ours(MISTRAL).render([user("a"), user("b")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ nothing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'].missing() }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ '%s' % (1, 2) }}",
    ],
)
def test_every_failure_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        ours(source).render([user("a")])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{% generation %}", "{% break %}"])
def test_a_template_with_a_syntax_error(source: str) -> None:
    with pytest.raises(TemplateError):
        ours(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_templates_are_given_up(source: str) -> None:
    with pytest.raises(TemplateError, match="longer than"):
        ours(source, time_limit_s=0.2).render([])


def test_endless_output_is_given_up() -> None:
    source = "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}"
    with pytest.raises(TemplateError, match="more than"):
        ours(source).render([])
