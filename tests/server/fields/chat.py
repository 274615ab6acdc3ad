"""Fields of chat alone."""

import json

from tests.server.conftest import REASONING_TEMPLATE, Bench, running
from tests.server.fields.rows import ask, body, calls_of, chat_row, names, prompt_of, said, tool


@chat_row("messages")
async def _(bench: Bench, kind: str) -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "e"},
    ]
    assert (
        await prompt_of(bench, kind, messages) == "<|system|>d\n<|user|>a\nb\n<|assistant|>c\n<|user|>e\n<|assistant|>"
    )


@chat_row("add_generation_prompt")
async def _(bench: Bench, kind: str) -> None:
    assert (await prompt_of(bench, kind)).endswith("<|assistant|>")
    assert (await prompt_of(bench, kind, add_generation_prompt=False)).endswith("|\n")


@chat_row("continue_final_message")
async def _(bench: Bench, kind: str) -> None:
    messages = [{"role": "user", "content": "SAY:x|"}, {"role": "assistant", "content": "so \n"}]
    assert (await prompt_of(bench, kind, messages, continue_final_message=True)).endswith("<|assistant|>so \n")
    assert (await prompt_of(bench, kind, messages)).endswith("so \n\n<|assistant|>")
    both = await bench.chat(messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400
    assert (await bench.chat("hi", continue_final_message=True)).status_code == 400


@chat_row("chat_template")
async def _(bench: Bench, kind: str) -> None:
    template = "{{ messages[0].content }}!"
    assert (await ask(bench, kind, chat_template=template)).json()["error"]["param"] == "chat_template"
    async with running(trust_request_chat_template=True) as other:
        assert await prompt_of(other, kind, chat_template=template) == "SAY:hello|!"
        assert (await ask(other, kind, chat_template="{% if")).status_code == 400


@chat_row("chat_template_kwargs")
async def _(bench: Bench, kind: str) -> None:
    assert "(glad)" in await prompt_of(bench, kind, chat_template_kwargs={"mood": "glad"})
    assert names(await body(bench, kind, chat_template_kwargs={"unread": 1})) == {"chat_template_kwargs.unread"}
    assert (await ask(bench, kind, chat_template_kwargs={"messages": []})).status_code == 400


@chat_row("documents")
async def _(bench: Bench, kind: str) -> None:
    assert names(await body(bench, kind, documents=[{"text": "t"}])) == {"documents"}
    async with running(template="{% for d in documents or [] %}[{{ d.text }}]{% endfor %}SAY:ok|") as other:
        assert await prompt_of(other, kind, documents=[{"text": "t"}]) == "[t]SAY:ok|"


@chat_row("tools")
async def _(bench: Bench, kind: str) -> None:
    assert "get_weather" in await prompt_of(bench, kind, tools=[tool("get_weather")])
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    answer = await body(bench, kind, f"SAY:{call}|", tools=[tool("get_weather")])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(calls_of(answer)[0]["function"]["arguments"]) == {"city": "Oslo"}
    assert calls_of(await body(bench, kind, f"SAY:{call}|")) == [], "without tools it is just text"
    assert (await ask(bench, kind, tools=[{"type": "custom", "custom": {"name": "x"}}])).status_code == 400


@chat_row("tool_choice")
async def _(bench: Bench, kind: str) -> None:
    tools = [tool("f"), tool("g")]
    forced = await body(bench, kind, tools=tools, tool_choice="required", max_tokens=300)
    assert calls_of(forced)
    assert forced["choices"][0]["message"]["content"] is None
    named = await body(bench, kind, tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert [call["function"]["name"] for call in calls_of(named)] == ["g"]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    only = await body(bench, kind, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert {call["function"]["name"] for call in calls_of(only)} == {"f"}
    assert calls_of(await body(bench, kind, tools=tools, tool_choice="none")) == []


@chat_row("parallel_tool_calls")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, tools=[tool("f")], tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(answer)) == 1
    assert names(await body(bench, kind, parallel_tool_calls=True)) == {"parallel_tool_calls"}


@chat_row("max_completion_tokens")
async def _(bench: Bench, kind: str) -> None:
    assert await said(bench, kind, max_completion_tokens=2) == "he"
    both = await body(bench, kind, max_completion_tokens=2, max_tokens=4)
    assert both["usage"]["completion_tokens"] == 2
    assert names(both) == {"max_tokens"}
    clamped = await body(bench, kind, max_completion_tokens=10**6)
    assert names(clamped) == {"max_completion_tokens"}, "reported under the name it was sent by"


@chat_row("logprobs")
async def _(bench: Bench, kind: str) -> None:
    logprobs = (await body(bench, kind, logprobs=True))["choices"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs["content"]] == [*"hello", "<|eos|>"]
    assert logprobs["refusal"] is None
    assert all(entry["top_logprobs"] == [] and entry["logprob"] < 0 for entry in logprobs["content"])
    assert logprobs["content"][0]["bytes"] == [ord("h")]
    assert (await body(bench, kind))["choices"][0]["logprobs"] is None


@chat_row("top_logprobs")
async def _(bench: Bench, kind: str) -> None:
    logprobs = (await body(bench, kind, logprobs=True, top_logprobs=3))["choices"][0]["logprobs"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in logprobs["content"])
    assert (await ask(bench, kind, top_logprobs=3)).json()["error"]["param"] == "top_logprobs"
    assert (await ask(bench, kind, logprobs=True, top_logprobs=21)).json()["error"]["param"] == "top_logprobs"


@chat_row("reasoning_effort")
async def _(bench: Bench, kind: str) -> None:
    assert names(await body(bench, kind, reasoning_effort="low")) == {"reasoning_effort"}
    async with running(template=REASONING_TEMPLATE) as other:
        assert (await prompt_of(other, kind, reasoning_effort="none")).endswith("<think></think>")
        assert not (await prompt_of(other, kind)).endswith("</think>")


@chat_row("prediction")
async def _(bench: Bench, kind: str) -> None:
    answer = await body(bench, kind, prediction={"type": "content", "content": "hello"})
    assert names(answer) == {"prediction"}
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
