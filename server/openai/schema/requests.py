"""The bodies of the five POST routes."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue, PlainValidator
from pydantic_core import PydanticCustomError

from server.openai.schema.base import INT64, NOT_NULL, SomeText, TokenId, Wire, exactly_one, needed, optional
from server.openai.schema.common import CommonFields
from server.openai.schema.messages import Message, ToolChoiceSpec, ToolSpec

PromptItem = str | tuple[int, ...]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_OWN_TEMPLATE = "A template for this request alone; refused by a server without --trust-request-chat-template."
_EXAMPLE_MESSAGES: list[JsonValue] = [{"role": "user", "content": "Name a river."}]


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _prompts(value: Any) -> tuple[PromptItem, ...]:
    """All accepted forms of `prompt` as a tuple of texts and id tuples."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "prompt must be a string, a list of strings, token ids, or lists of those")
    if not value:
        raise PydanticCustomError("prompt", "prompt must not be an empty list")
    if _is_ids(value):
        return (tuple(value),)
    return tuple(_prompt_item(item, index) for index, item in enumerate(value))


def _prompt_item(item: Any, index: int) -> PromptItem:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item and _is_ids(item):
        return tuple(item)
    raise PydanticCustomError(
        "prompt", "prompt[{index}] must be a string or a list of at least one token id", {"index": index}
    )


_T = TypeVar("_T")
Several = Annotated[list[_T], Field(min_length=1)]
Ids = Several[TokenId]
Prompts = Annotated[
    tuple[PromptItem, ...],
    PlainValidator(_prompts, json_schema_input_type=SomeText | Several[SomeText] | Several[TokenId] | Several[Ids]),
]


class CompletionRequest(CommonFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}]}
    )

    prompt: Prompts = needed("A text, token ids, or a list of those.", "1, 2, 3,")
    best_of: int | None = optional("Draw that many answers and return the n likeliest.", 1, ge=1, le=128)
    logprobs: int | None = optional("Logprobs with that many alternatives, up to the server's --max-logprobs.", 1, ge=0)
    suffix: str | None = optional("Text after the gap; for fill-in-the-middle models only.", "")


class _ChatPrompt(Wire):
    """What of a chat body decides the prompt."""

    messages: list[Message] = needed("The conversation.", _EXAMPLE_MESSAGES, min_length=1)
    add_generation_prompt: bool | None = optional("Open the assistant's turn.", True)
    continue_final_message: bool | None = optional("Go on with the last message, an assistant's.", False)
    chat_template: str | None = optional(_OWN_TEMPLATE, None)
    chat_template_kwargs: dict[str, Any] | None = optional("Variables for the template.", {"enable_thinking": False})
    documents: list[dict[str, Any]] | None = optional("Documents for templates that take them.", [])
    tools: list[ToolSpec] | None = optional(
        "Functions the model may call.", [{"type": "function", "function": {"name": "get_weather"}}]
    )


class ChatRequest(_ChatPrompt, CommonFields):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": _EXAMPLE_MESSAGES, "max_tokens": 16}]})

    max_completion_tokens: int | None = optional("Newer name of max_tokens.", 64, ge=0)
    logprobs: bool | None = optional("Give the logprobs of the answer's tokens.", False)
    top_logprobs: int | None = optional(
        "With that many alternatives, up to the server's --max-logprobs; needs logprobs.", 2, ge=0
    )
    tool_choice: ToolChoiceSpec | None = optional("Whether and what to call.", "auto")
    parallel_tool_calls: bool | None = optional("Whether one answer may hold several calls.", True)
    reasoning_effort: Effort | None = optional("How much to think, for templates that know it.", "low")
    prediction: dict[str, Any] | None = optional(
        "Expected text; a hint for speed only.", {"type": "content", "content": "hello"}
    )


class PromptFields(Wire):
    """A prompt: either `prompt`, or `messages` with the fields that decide a chat prompt."""

    model: str | None = optional("Which model.", "SmolLM2-135M-Instruct")
    prompt: str | None = optional("The text.", "1, 2, 3,")
    messages: list[Message] | None = optional("Or a conversation.", _EXAMPLE_MESSAGES, min_length=1)
    add_generation_prompt: bool | None = optional("Open the assistant's turn.", True)
    continue_final_message: bool | None = optional("Leave the last turn open.", False)
    chat_template: str | None = optional(_OWN_TEMPLATE, None)
    chat_template_kwargs: dict[str, Any] | None = optional("Variables for the template.", {"enable_thinking": False})
    documents: list[dict[str, Any]] | None = optional("Documents for templates that take them.", [])
    tools: list[ToolSpec] | None = optional("Functions the template shall show.", [])
    add_special_tokens: bool | None = optional("Let the tokenizer add its own.", True)


class TokenizeRequest(PromptFields):
    """Body of `POST /tokenize`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "1, 2, 3,"}],
            **exactly_one(prompt=NOT_NULL, messages=NOT_NULL),
        }
    )

    return_token_strs: bool | None = optional("Also give each token's text.", True)


class CapacityRequest(PromptFields):
    """Body of `POST /v1/capacity`: a prompt, or only its length, and how long the answer may be."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt_tokens": 2000, "max_tokens": 200}],
            **exactly_one(prompt=NOT_NULL, messages=NOT_NULL, prompt_tokens=NOT_NULL),
        }
    )

    prompt_tokens: int | None = optional("Or only how many tokens the prompt has.", 2000, ge=1, lt=INT64)
    max_tokens: int = needed("The most tokens of the answer.", 200, ge=1, lt=INT64)
    cache_salt: str | None = optional("As in the request that may follow.", "team-a", min_length=1, max_length=128)


class DetokenizeRequest(Wire):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [33, 28]}]})

    model: str | None = optional("Which model.", "SmolLM2-135M-Instruct")
    tokens: list[TokenId] = needed("Token ids.", [33, 28])
