"""Chat completions: from a body to a plan, and how its chunks look on the wire."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.errors import bad_request
from server.openai.conversation import ChatPromptFields, Rendering, rendering
from server.openai.explain import explain_style
from server.openai.logprobs import chat_logprobs, prompt_logprobs
from server.openai.notes import Notes
from server.openai.plan import OutputPlan, Plan
from server.openai.schema.requests import ChatRequest
from server.openai.settings import Setting
from server.openai.structure import answer_form, chat_router, chat_spec, compiled, tool_use
from server.openai.translate import (
    Arrival,
    Ask,
    Prompt,
    Target,
    build_plan,
    logprob_style,
    notes_on,
    text_options,
)
from server.openai.turns import with_replies
from server.openai.wire import News, Opening
from server.state import Served
from server.text.choice import ChoiceDelta
from server.text.pieces import ToolCallDelta

THREAD_CHARACTERS = 20_000
"""Longer prompts are rendered and encoded off the event loop."""


async def plan_chat(body: ChatRequest, arrival: Arrival, target: Target) -> Plan:
    """Translate a chat body.

    Raises:
        ApiError, ParamError, TemplateError, GrammarError: the request can't be served as asked.
    """
    served, config = target.served, target.config
    notes = notes_on(body, target)
    check_template_allowed(body, trusted=config.trust_request_chat_template)
    if body.prediction is not None:
        notes.ignored("prediction", body.prediction, "this server does not speculate on predicted text")
    num_top = _num_top(body)
    style = logprob_style(body, num_top, "top_logprobs", config.max_logprobs)
    use = tool_use(body, notes)
    await served.tool_check.check(use.tools)
    form = answer_form(body, use, served.tool_dialect, notes)
    view = rendering(body, served, use.shown, body.reasoning_effort, notes)
    prompt, prompt_ids = await render_and_encode(view, served, bool(body.add_special_tokens))
    constraint = await compiled(chat_spec(form, served, prompt), served)
    output = OutputPlan(
        num_choices=body.n or 1,
        text=text_options(body, show_special_tokens=bool(use.callable) and served.tool_dialect.shows_special_tokens),
        logprobs=style,
        num_prompt_logprobs=body.prompt_logprobs,
        echo_text=_echo_text(body, view, notes),
        return_token_ids=bool(body.return_token_ids),
        make_router=chat_router(use, form, served, prompt),
        reports_reasoning=True,
        has_prediction=body.prediction is not None,
        explain=explain_style(body, config),
    )
    turn = await with_replies(Prompt(prompt_ids), body, served)
    ask = Ask(
        prompts=[turn],
        prompt_param="messages",
        max_tokens=_max_tokens(body, notes),
        num_drawn=body.n or 1,
        scores_choices=False,
        constraint=constraint,
        max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
    )
    return build_plan(body, ask, output, arrival, target, notes)


def check_template_allowed(body: ChatPromptFields, *, trusted: bool) -> None:
    """Refuse a template of the request's own unless the server allows it. Raises ApiError (400)."""
    if body.chat_template is not None and not trusted:
        message = "chat_template in a request needs a server started with --trust-request-chat-template."
        raise bad_request(message, "chat_template")


async def render_and_encode(view: Rendering, served: Served, add_special_tokens: bool) -> tuple[str, list[int]]:
    """The prompt's text and its token ids, a BOS never doubled. Raises TemplateError."""
    own = None if view.template is not None else await served.own_templates.render(view.source, view.arguments)

    def work() -> tuple[str, list[int]]:
        text = view.template.render(**view.arguments) if view.template is not None else own or ""
        return text, served.tokenizer.encode_rendered(text, add_special_tokens=add_special_tokens)

    num_characters = view.num_characters if own is None else len(own)
    return await asyncio.to_thread(work) if num_characters > THREAD_CHARACTERS else work()


def _num_top(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise bad_request("top_logprobs can only be used together with logprobs.", "top_logprobs")
    return None


def _max_tokens(body: ChatRequest, notes: Notes) -> Setting | None:
    """The wanted length; None for all that is left of the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    for name, value in (("max_tokens", old), ("max_completion_tokens", new)):
        if value == 0:
            raise bad_request(f"{name} must be at least 1.", name)
    if old is not None and new is not None and old != new:
        notes.changed("max_tokens", old, new, "max_completion_tokens is given too and wins")
    wanted = new if new is not None else old
    return None if wanted is None else Setting(wanted, "request")


def _echo_text(body: ChatRequest, view: Rendering, notes: Notes) -> str:
    """What an echo begins with: the assistant's last message."""
    if not body.echo:
        return ""
    if view.open_content is None:
        notes.ignored("echo", True, "the last message is not the assistant's")
    return view.open_content or ""


class ChatWire:
    """How chat chunks look, choice by choice."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def top_level(self, opening: Opening) -> dict[str, Any]:
        """What the answer's first chunk carries beside the choice."""
        plan, handle = opening.plan, opening.handle
        fields: dict[str, Any] = {}
        if plan.output.num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(handle, plan.output.num_prompt_logprobs, opening.tokenizer)
        if plan.output.return_token_ids:
            fields["prompt_token_ids"] = list(handle.request.prompt_ids)
        return fields

    def open(self, opening: Opening, index: int) -> dict[str, Any]:
        """The first chunk of a choice."""
        delta = {"role": "assistant", "content": opening.plan.output.echo_text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, news: News) -> dict[str, Any] | None:
        """A chunk with new text; None when there is nothing to show."""
        output, delta = news.plan.output, news.delta
        shown = _delta_fields(delta)
        wants_tokens = bool(delta.tokens) and output.logprobs is not None
        if not shown and not wants_tokens and not (output.return_token_ids and news.token_ids):
            return None
        choice: dict[str, Any] = {"index": news.index, "delta": shown, "logprobs": None, "finish_reason": None}
        if output.logprobs is not None and delta.tokens:
            choice["logprobs"] = chat_logprobs(delta.tokens, output.logprobs, news.tokenizer)
        if output.return_token_ids:
            choice["token_ids"] = list(news.token_ids)
        return choice

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        """The last chunk of a choice."""
        ends = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        return {"index": index, "delta": {}, "logprobs": None} | ends


def _delta_fields(delta: ChoiceDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.pieces.reasoning:
        fields["reasoning_content"] = delta.pieces.reasoning
    if delta.pieces.content:
        fields["content"] = delta.pieces.content
    if delta.pieces.tool_calls:
        fields["tool_calls"] = [_call_delta(call) for call in _joined(delta.pieces.tool_calls)]
    return fields


def _joined(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """One delta per call: some clients look only at the first of a chunk's."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call carries its id, type and name; later ones only a piece of the arguments."""
    if call.call_id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}
