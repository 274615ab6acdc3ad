"""Chat templates: messages in, prompt text out, as the model's own template says, in a sandbox.

Knows Jinja and the conventions that transformers gives templates (trimmed blocks, `raise_exception`, `strftime_now`,
`tojson` that escapes no HTML, loop controls, the `generation` tag, the special tokens by name). Messages are passed on
as they are: nothing is added, merged or reordered here. Knows nothing of tokens' ids.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MAX_CHARS = 64 * 1024 * 1024


class TemplateError(ValueError):
    """The template refused the messages, or is no valid template; the message is what it said."""


class HasSpecialTokens(Protocol):
    """What a template needs of a tokenizer."""

    special_tokens: dict[str, str]


class ChatTemplate:
    """One compiled chat template. Rendering is a pure function of its arguments (and, in some templates, the date).

    Attributes:
        source: the template's text.
    """

    def __init__(
        self,
        source: str,
        tokenizer: HasSpecialTokens,
        *,
        time_limit_s: float = 10.0,
        max_chars: int = MAX_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`. Rendering is given up after `time_limit_s`, or `max_chars` of text.

        Raises:
            TemplateError: a syntax error.
        """
        self.source = source
        self._max_chars = max_chars
        self._special_tokens = dict(tokenizer.special_tokens)
        self._environment = _Environment(time_limit_s, now)
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise TemplateError(f"the chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` reach the template by name and win over the special tokens.

        With `continue_final_message` the prompt ends exactly where the last message's text ends, its own spaces
        included, for the model to go on with.

        Raises:
            TemplateError: the template raised, took too long, or lost the message that is to be continued.
        """
        prepared = [_prepared(message) for message in messages]
        sentinel = None
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
            sentinel = _mark_end(prepared)
        variables = {**self._special_tokens, **kwargs}
        variables.update(
            messages=prepared,
            tools=list(tools) if tools is not None else None,
            documents=list(documents) if documents is not None else None,
            add_generation_prompt=add_generation_prompt,
        )
        text = self._run(variables)
        return text if sentinel is None else _cut(text, sentinel)

    def _run(self, variables: dict[str, Any]) -> str:
        self._environment.start_clock()
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                num_chars += len(part)
                if num_chars > self._max_chars:
                    raise TemplateError(f"the chat template wrote more than {self._max_chars} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or str(error)) from error
        except RecursionError as error:
            raise TemplateError("the chat template, or what it was given, is nested too deeply") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)


def _prepared(message: Mapping[str, Any]) -> Message:
    """A copy as templates expect it: no null fields, reasoning under its usual names, tool arguments as an object."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[key] for key in _REASONING_KEYS if key in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    if isinstance(prepared.get("tool_calls"), list):
        prepared["tool_calls"] = [_with_object_arguments(call) for call in prepared["tool_calls"]]
    return prepared


def _with_object_arguments(call: Any) -> Any:
    """OpenAI writes a call's arguments as JSON text; templates write them out themselves and expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _mark_end(messages: list[Message]) -> str:
    """Append a text found nowhere else to the last message's text, and return it."""
    sentinel = f"END{uuid.uuid4().hex}"
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or content is None:
        raise TemplateError("continue_final_message needs a last message of role assistant that has content")
    if isinstance(content, str):
        last["content"] = content + sentinel
        return sentinel
    parts = [dict(part) for part in content]
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            part["text"] += sentinel
            last["content"] = parts
            return sentinel
    raise TemplateError("continue_final_message needs a text in the last message")


def _cut(text: str, sentinel: str) -> str:
    end = text.rfind(sentinel)
    if end < 0:
        raise TemplateError("the chat template does not write out the last message, so it cannot be continued")
    return text[:end]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox. Every turn of a loop and every macro call looks at the clock, so no template runs for ever."""

    def __init__(self, time_limit_s: float, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._time_limit_s = time_limit_s
        self._clock = threading.local()  # one template may be rendered by several threads
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda layout: now().strftime(layout),
            namespace=_Namespace,
            dict=lambda *args, **kwargs: dict(*args, **kwargs),
        )

    def start_clock(self) -> None:
        """The time limit counts from now."""
        self._clock.deadline_s = time.monotonic() + self._time_limit_s

    def check_clock(self) -> str:
        """Nothing, to be written out; raises when the time is up."""
        if time.monotonic() > self._clock.deadline_s:
            raise jinja2.TemplateRuntimeError(f"the chat template ran longer than {self._time_limit_s:g} s")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all(nodes.Stmt)):
            if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
                check = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
        return tree


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's statements in its place, with a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # every keyword, `self` too, is the template's
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
