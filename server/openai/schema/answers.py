"""The shapes of answers, for the OpenAPI document. Answers are written as plain JSON, never through these."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(examples=["temperature: Input should be less than or equal to 2"])
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["temperature"])
    code: str | None = Field(examples=[None])
    reason: str | None = Field(default=None, description="429 and 503: which bound was hit.", examples=["requests"])
    queue_depth: int | None = Field(default=None, description="429 and 503: how much of it is in use.", examples=[32])
    limit: int | None = Field(default=None, description="429 and 503: the bound.", examples=[32])
    retry_after_s: float | None = Field(default=None, description="429 and 503: when to come back.", examples=[2.5])


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those that came from the prefix cache."""

    cached_tokens: int = Field(examples=[16])


class CompletionTokensDetails(BaseModel):
    """Of the answer's tokens, those of one kind; parts that don't apply are absent."""

    reasoning_tokens: int = Field(default=0, examples=[0])
    accepted_prediction_tokens: int = Field(default=0, examples=[0])
    rejected_prediction_tokens: int = Field(default=0, examples=[0])


class Usage(BaseModel):
    """Token counts; each prompt counts once."""

    prompt_tokens: int = Field(examples=[12])
    completion_tokens: int = Field(examples=[7])
    total_tokens: int = Field(examples=[19])
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class SettingShown(BaseModel):
    """A setting's value and where it came from."""

    value: Any = Field(examples=[0.7])
    source: Literal["request", "model", "server"] = Field(examples=["request"])


class ParamWarning(BaseModel):
    """A field that was not taken as given."""

    param: str = Field(examples=["max_tokens"])
    given: Any = Field(examples=[100000])
    used: Any = Field(examples=[8000])
    why: str = Field(examples=["192 prompt tokens leave 8000 of the context's 8192"])


class TopLogprob(BaseModel):
    """A likely token."""

    token: str = Field(examples=[" Rhine"])
    logprob: float = Field(examples=[-0.12])
    bytes: list[int] = Field(examples=[[32, 82]])


class TokenLogprobShown(TopLogprob):
    """A token of the answer and the likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The answer's tokens."""

    content: list[TokenLogprobShown]
    refusal: None = None


class FunctionCalled(BaseModel):
    """The function and its arguments, a JSON object as text."""

    name: str = Field(examples=["get_weather"])
    arguments: str = Field(examples=['{"city": "Oslo"}'])


class ToolCallMade(BaseModel):
    """A call for the client to carry out."""

    id: str = Field(examples=["call_1"])
    type: Literal["function"] = "function"
    function: FunctionCalled


class ChatMessage(BaseModel):
    """What the model says. `reasoning_content` and `tool_calls` are absent when there are none."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(examples=["The Rhine."])
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallMade] | None = None


class _Ended(BaseModel):
    index: int = Field(examples=[0])
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(examples=["stop"])
    stop_reason: str | int | None = Field(default=None, description="The stop string or token, if one ended it.")
    token_ids: list[int] | None = Field(default=None, description="With return_token_ids.")


class ChatChoice(_Ended):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class CompletionLogprobs(BaseModel):
    """Parallel arrays, an entry per token."""

    tokens: list[str] = Field(examples=[[" 4"]])
    token_logprobs: list[float | None] = Field(examples=[[-0.1]])
    top_logprobs: list[dict[str, float] | None] = Field(examples=[[{" 4": -0.1}]])
    text_offset: list[int] = Field(examples=[[8]])


class CompletionChoice(_Ended):
    """One continuation."""

    text: str = Field(examples=[" 4, 5, 6"])
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = Field(default=None, description="With return_token_ids.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(default=None, description="With prompt_logprobs.")


class _Answer(BaseModel):
    id: str = Field(examples=["chatcmpl-1f0c"])
    created: int = Field(examples=[1700000000])
    model: str = Field(examples=["SmolLM2-135M-Instruct"])
    system_fingerprint: str = Field(examples=["fp_1f0c"])
    usage: Usage
    sampling: dict[str, SettingShown] = Field(description="Every setting that decided the draw, and its source.")
    warnings: list[ParamWarning] | None = Field(default=None, description="Fields that were not taken as given.")


class ChatCompletion(_Answer):
    """Answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = Field(default=None, description="With return_token_ids.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(default=None, description="With prompt_logprobs.")


class Completion(_Answer):
    """Answer of `POST /v1/completions`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    """A served model."""

    id: str = Field(examples=["SmolLM2-135M-Instruct"])
    object: Literal["model"] = "model"
    created: int = Field(examples=[1700000000])
    owned_by: str = Field(examples=["quire"])
    root: str = Field(examples=["SmolLM2-135M-Instruct"])
    parent: str | None = None
    max_model_len: int = Field(examples=[8192])


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    """A text's tokens."""

    count: int = Field(examples=[2])
    max_model_len: int = Field(examples=[8192])
    tokens: list[int] = Field(examples=[[33, 28]])
    token_strs: list[str] | None = Field(default=None, examples=[["1", ","]])
    warnings: list[ParamWarning] | None = Field(default=None, description="Fields that were not taken as given.")


class Detokenized(BaseModel):
    """The tokens' text."""

    prompt: str = Field(examples=["1,"])
    warnings: list[ParamWarning] | None = Field(default=None, description="Fields that were not taken as given.")


class TokenizerInfo(BaseModel):
    """What a client needs to count tokens as this server does."""

    vocab_size: int = Field(examples=[49152])
    max_model_len: int = Field(examples=[8192])
    bos_token: str | None = Field(examples=["<|im_start|>"])
    bos_token_id: int | None = Field(examples=[1])
    eos_token: str | None = Field(examples=["<|im_end|>"])
    eos_token_id: int | None = Field(examples=[2])
    special_tokens: dict[int, str] = Field(examples=[{"0": "<|endoftext|>"}])
    stop_token_ids: list[int] = Field(examples=[[0, 2]])
    fingerprint: str = Field(examples=["4f3c"])
    chat_template: str | None = Field(examples=["{{ messages[0].content }}"])


class KVState(BaseModel):
    """The KV pool."""

    object: Literal["kv"] = Field(examples=["kv"])
    kv_dtype: str = Field(examples=["bfloat16"])
    block_size: int = Field(description="Tokens of a block.", examples=[16])
    bytes_per_token: int = Field(examples=[23040])
    bytes_per_block: int = Field(examples=[368640])
    blocks: dict[str, int] = Field(description="total, referenced, cached, free, pinned.", examples=[{"total": 1024}])
    occupancy: float = Field(description="Share of the blocks that requests hold.", examples=[0.25])
    fragmentation: dict[str, float] = Field(description="unused_tokens, bytes, percent.", examples=[{"percent": 2.5}])
    prefix_cache: dict[str, float] = Field(
        description="queried_tokens, hit_tokens, hit_rate, evicted_blocks.", examples=[{"hit_rate": 0.75}]
    )
    block_age_s: dict[str, float | None] = Field(
        description="Since findable blocks were filled: count, newest, median, oldest.", examples=[{"median": 42.0}]
    )
    tiers: list[dict[str, Any]] = Field(description="Where evicted blocks live on.", examples=[[]])
    top_prefixes: list[dict[str, Any]] = Field(
        description="hash, blocks, tokens, bytes, hits, holders.", examples=[[{"hash": "0f3c", "hits": 50}]]
    )


class CapacityAnswer(BaseModel):
    """What would become of a request that came now."""

    object: Literal["capacity"] = Field(examples=["capacity"])
    prompt_tokens: int = Field(examples=[2000])
    cached_tokens: int = Field(description="Of these, in the prefix cache.", examples=[1984])
    max_tokens: int = Field(examples=[200])
    accepted: bool = Field(description="Whether it would be taken.", examples=[True])
    refusal: ErrorDetail | None = Field(description="Why not.", examples=[None])
    fits_now: bool = Field(description="Whether it would begin with the next step.", examples=[True])
    predicted: dict[str, float] | None = Field(
        description="queue_wait_s, ttft_s, finish_s; null before anything was measured.", examples=[{"ttft_s": 0.4}]
    )
    concurrent: int | None = Field(description="Such requests that run at once on an idle server.", examples=[12])
    load: dict[str, int] = Field(description="running, waiting, kv_tokens, kv_tokens_used.", examples=[{}])
