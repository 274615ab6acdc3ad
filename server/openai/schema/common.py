"""The fields that chat and completions share: sampling, limits, output options, and the ones only taken note of."""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.openai.schema.base import INT64, SomeText, TokenId, Wire, optional
from server.openai.schema.formats import ResponseFormat, StreamOptions, StructuredOutputs

MAX_STOPS = 16
MAX_CHOICES = 128

BiasedToken = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stops = Annotated[list[SomeText], Field(max_length=MAX_STOPS)]


class SamplingFields(Wire):
    """How tokens are chosen. What is left out comes from the model's generation config, else is neutral."""

    temperature: float | None = optional("0 takes the likeliest token.", 0.7, ge=0, le=2)
    top_p: float | None = optional("Nucleus sampling.", 0.9, gt=0, le=1)
    top_k: int | None = optional("The k likeliest tokens; -1 and 0 are off.", 40, ge=-1)
    min_p: float | None = optional("At least this share of the likeliest token's probability.", 0.05, ge=0, le=1)
    typical_p: float | None = optional("Locally typical sampling.", 0.95, gt=0, le=1)
    repetition_penalty: float | None = optional("Over prompt and output; 1 is off.", 1.1, gt=0)
    frequency_penalty: float | None = optional("Over the output, by count.", 0.5, ge=-2, le=2)
    presence_penalty: float | None = optional("Over the output, once.", 0.5, ge=-2, le=2)
    seed: int | None = optional("The same seed gives the same draw.", 42, ge=-INT64, lt=INT64)
    logit_bias: dict[BiasedToken, Bias] | None = optional("Token id -> what is added to its logit.", {"42": -100})
    allowed_token_ids: list[TokenId] | None = optional("Only these tokens may be drawn.", [42, 43], min_length=1)
    bad_words: list[SomeText] | None = optional("Texts that may not be generated.", ["foo"])
    n: int | None = optional("How many answers.", 1, ge=1, le=MAX_CHOICES)


class StopFields(Wire):
    """When an answer ends."""

    max_tokens: int | None = optional("The most tokens of an answer.", 64, ge=0)
    min_tokens: int | None = optional("No stop token before that many.", 4, ge=0, lt=INT64)
    stop: SomeText | Stops | None = optional("Up to 16 texts that end the answer.", ["\n\n"])
    stop_token_ids: list[TokenId] | None = optional("Tokens that end the answer.", [2])
    ignore_eos: bool | None = optional("Go on after the model's end token.", False)
    include_stop_str_in_output: bool | None = optional("Keep what ended the answer.", False)


class OutputFields(Wire):
    """How the answer is written down."""

    stream: bool | None = optional("Send the answer piece by piece.", False)
    stream_options: StreamOptions | None = optional("Only with stream.", {"include_usage": True})
    echo: bool | None = optional("Begin the answer with the prompt (chat: with the message that is continued).", False)
    skip_special_tokens: bool | None = optional("Leave special tokens out of the text.", True)
    spaces_between_special_tokens: bool | None = optional("Spaces between special tokens that are shown.", True)
    prompt_logprobs: int | None = optional(
        "Logprobs of the prompt's tokens, with that many alternatives, up to the server's --max-logprobs.", 1, ge=0
    )
    logprob_token_ids: list[TokenId] | None = optional("Tokens whose logprobs are reported everywhere.", [42])
    cache_explain: bool | None = optional("Tell what the prefix cache knew of the prompt, and why not more.", False)
    return_token_ids: bool | None = optional("Also give token ids of prompt and answer.", False)
    return_tokens_as_token_ids: bool | None = optional('Write tokens in logprobs as "token_id:42".', False)
    response_format: ResponseFormat | None = optional("What the answer is held to.", {"type": "json_object"})
    structured_outputs: StructuredOutputs | None = optional("The same, in vLLM's form.", {"choice": ["yes", "no"]})
    guided_json: dict[str, Any] | str | None = optional("Old name of structured_outputs.json.", {"type": "object"})
    guided_regex: str | None = optional("Old name of structured_outputs.regex.", "[0-9]+")
    guided_choice: list[str] | None = optional("Old name of structured_outputs.choice.", ["yes", "no"], min_length=1)
    guided_grammar: str | None = optional("Old name of structured_outputs.grammar.", 'start: "yes"')


class ServingFields(Wire):
    """How the request is treated while it waits and runs."""

    model: str | None = optional("Which model; may be left out where one is served.", "SmolLM2-135M-Instruct")
    truncate_prompt_tokens: int | None = optional(
        "Keep only the prompt's last tokens, that many; -1: as many as fit.", -1, ge=-1
    )
    add_special_tokens: bool | None = optional("Let the tokenizer add its own (such as BOS).", True)
    cache_salt: str | None = optional(
        "Share the prefix cache only under one salt.", "team-a", min_length=1, max_length=128
    )
    priority: int | None = optional("Lower is served first, under the priority policy.", 0, ge=-INT64, lt=INT64)
    timeout_ms: int | None = optional("The whole answer must be done within that many milliseconds.", 60000, ge=1)
    queue_timeout_ms: int | None = optional("It must have begun within that many milliseconds.", 5000, ge=1)


class NotedFields(Wire):
    """Fields of OpenAI's platform that have nothing to act on here; they are reported when they ask for something."""

    user: str | None = optional("The caller's name for its user.", "user-1")
    safety_identifier: str | None = optional("The same, hashed.", "a1b2")
    metadata: dict[str, str] | None = optional("Labels for stored answers.", {"topic": "rivers"})
    store: bool | None = optional("Keep the answer. Nothing is kept here.", False)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = optional(
        "There is one tier only.", "auto"
    )
    prompt_cache_key: str | None = optional(
        "Prompts under one key stay cached under pressure, within the server's pin budget.", "assistant-v1"
    )


class CommonFields(SamplingFields, StopFields, OutputFields, ServingFields, NotedFields):
    """Everything that chat and completions share."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none empty."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
