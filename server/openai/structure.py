"""What an answer is held to, and how it is taken apart: response formats, tools, reasoning.

Turns the wire's several ways to ask for structure into one grammar and one router. Knows the dialect's and the
compiler's interfaces, no grammar and no marker itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.sampling.constraint import Constraint
from server.errors import bad_request
from server.openai.conversation import wire_tools
from server.openai.notes import Notes
from server.openai.schema.common import CommonFields
from server.openai.schema.formats import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from server.openai.schema.messages import AllowedTools, NamedTool
from server.openai.schema.requests import ChatRequest
from server.state import Served
from server.text.pieces import TextRouter
from server.text.reasoning import compose, prompt_opens_reasoning, reasoning_prefix, reasoning_router
from server.text.structured import GrammarSpec
from server.text.tools.dialect import Tool, ToolChoice, ToolDialect
from server.text.tools.leading import LeadingRouter

FORCED = "tool_choice forces a call, and a call has no content"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, which of them may be called, and how often."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools the prompt shows: all of them, or none when none may be called."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return self.choice.callable_tools(self.tools)


def tool_use(body: ChatRequest, notes: Notes) -> ToolUse:
    """The tools and the choice of a chat body. Raises ApiError (400) when they don't go together."""
    tools = wire_tools(body.tools or [])
    if body.parallel_tool_calls is not None and not tools:
        notes.ignored("parallel_tool_calls", body.parallel_tool_calls, "there are no tools")
    choice = _choice(body, tools)
    return ToolUse(tools, choice, parallel=body.parallel_tool_calls is not False)


def _choice(body: ChatRequest, tools: tuple[Tool, ...]) -> ToolChoice:
    wanted = body.tool_choice
    if wanted in (None, "auto", "none"):
        return ToolChoice("auto" if tools and wanted != "none" else "none")
    if not tools:
        raise bad_request("tool_choice needs tools to choose from.", "tool_choice")
    if isinstance(wanted, NamedTool):
        return ToolChoice.named(_known(wanted.function.name, tools))
    if isinstance(wanted, AllowedTools):
        names = [_known(tool.function.name, tools) for tool in wanted.allowed_tools.tools]
        return ToolChoice.allowed(wanted.allowed_tools.mode, names)
    return ToolChoice("required")


def _known(name: str, tools: tuple[Tool, ...]) -> str:
    if name not in {tool.name for tool in tools}:
        raise bad_request(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
    return name


def format_spec(body: CommonFields) -> GrammarSpec | None:
    """The grammar of `response_format`, `structured_outputs` or an old `guided_...` field.

    Raises:
        ApiError: two of them at once, or a schema given as text that is no JSON.
        GrammarError: a schema that is no JSON.
    """
    specs = [spec for spec in (_response_format(body), _structured(body), *_guided(body)) if spec is not None]
    if len(specs) > 1:
        names = " and ".join(str(spec.param) for spec in specs)
        raise bad_request(f"{names} cannot be used together.", specs[1].param)
    return specs[0] if specs else None


def _response_format(body: CommonFields) -> GrammarSpec | None:
    wanted = body.response_format
    if isinstance(wanted, JsonObjectFormat):
        return GrammarSpec.json_object("response_format")
    if isinstance(wanted, JsonSchemaFormat):
        return GrammarSpec.json_schema(wanted.json_schema.schema_, "response_format.json_schema.schema")
    return None


def _structured(body: CommonFields) -> GrammarSpec | None:
    wanted = body.structured_outputs
    return None if wanted is None else _one_of(wanted, "structured_outputs.")


def _one_of(wanted: StructuredOutputs, prefix: str) -> GrammarSpec:
    if wanted.json_ is not None:
        return GrammarSpec.json_schema(_schema(wanted.json_, f"{prefix}json"), f"{prefix}json")
    if wanted.regex is not None:
        return GrammarSpec.regex(wanted.regex, f"{prefix}regex")
    if wanted.choice is not None:
        return GrammarSpec.choice(wanted.choice, f"{prefix}choice")
    if wanted.grammar is not None:
        return GrammarSpec.grammar(wanted.grammar, f"{prefix}grammar")
    return GrammarSpec.json_object(f"{prefix}json_object")


def _guided(body: CommonFields) -> list[GrammarSpec]:
    specs = []
    if body.guided_json is not None:
        specs.append(GrammarSpec.json_schema(_schema(body.guided_json, "guided_json"), "guided_json"))
    if body.guided_regex is not None:
        specs.append(GrammarSpec.regex(body.guided_regex, "guided_regex"))
    if body.guided_choice is not None:
        specs.append(GrammarSpec.choice(body.guided_choice, "guided_choice"))
    if body.guided_grammar is not None:
        specs.append(GrammarSpec.grammar(body.guided_grammar, "guided_grammar"))
    return specs


def _schema(value: dict[str, Any] | str, param: str) -> Any:
    if isinstance(value, dict):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{param} is not valid JSON: {error}", param) from None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a chat answer is: content, tool calls, or either.

    Attributes:
        spec: the grammar it is held to; None for free text.
        is_either: it is wanted content or calls, never both, so that only its beginning tells.
    """

    spec: GrammarSpec | None
    is_either: bool = False


def answer_form(body: ChatRequest, use: ToolUse, dialect: ToolDialect, notes: Notes) -> AnswerForm:
    """The form of a chat answer: of the forced or strict tool calls, of the wanted format, or one of the two.

    Raises:
        ApiError, GrammarError: a format that can't be told from the calls that may be made instead.
    """
    wanted = format_spec(body)
    if not use.callable:
        return AnswerForm(wanted)
    if wanted is not None and use.choice.forces_call:
        name = str(wanted.param).partition(".")[0]
        notes.ignored(name, body.model_dump(include={name}, exclude_none=True, by_alias=True)[name], FORCED)
        wanted = None
    if wanted is None:
        return AnswerForm(dialect.grammar(use.tools, use.choice, use.parallel))
    answer = wanted.as_rule("answer")
    if answer is None:
        raise bad_request(
            f"{wanted.param} together with tools that may be called leaves open which of the two an answer is; send "
            "a JSON Schema, or tool_choice none or required.",
            wanted.param,
        )
    return AnswerForm(dialect.grammar(use.tools, use.choice, use.parallel, answer), is_either=True)


def chat_spec(form: AnswerForm, served: Served, prompt: str) -> GrammarSpec | None:
    """The grammar of the whole output; a model that thinks first is held to its answer's only after the reasoning."""
    spec, parser = form.spec, served.reasoning or "none"
    prefix = reasoning_prefix(parser, prompt_opens_reasoning(parser, prompt))
    return spec.after_reasoning(prefix) if spec is not None and prefix is not None else spec


async def compiled(spec: GrammarSpec | None, served: Served) -> Constraint | None:
    """The constraint for `spec`, compiled off the event loop. Raises GrammarError."""
    return None if spec is None else await served.structured.compile(spec)


def chat_router(use: ToolUse, form: AnswerForm, served: Served, prompt: str) -> Callable[[], TextRouter] | None:
    """What makes the router of one chat choice: reasoning first, then tool calls; None when all text is content."""
    parser = served.reasoning or "none"
    begun = prompt_opens_reasoning(parser, prompt)

    def calls() -> TextRouter:
        router, opening = served.tool_dialect.router(use.callable), served.tool_dialect.opening
        return LeadingRouter(opening, router) if form.is_either and opening else router

    if parser == "none":
        return calls if use.callable else None
    if not use.callable:
        return lambda: reasoning_router(parser, begun)
    return lambda: compose(reasoning_router(parser, begun), calls())
