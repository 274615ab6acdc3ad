"""Text completions: from a body to a plan, and how its chunks look on the wire."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.batch import TokenLogprob
from server.errors import bad_request
from server.openai.chat import THREAD_CHARACTERS
from server.openai.explain import explain_style
from server.openai.logprobs import completion_logprobs, prompt_logprobs
from server.openai.plan import OutputPlan, Plan
from server.openai.schema.requests import CompletionRequest, PromptItem
from server.openai.settings import Setting
from server.openai.structure import compiled, format_spec
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
from server.text.choice import TextOptions, TokenPiece, prompt_pieces

DEFAULT_MAX_TOKENS = 16


async def plan_completion(body: CompletionRequest, arrival: Arrival, target: Target) -> Plan:
    """Translate a completion body.

    Raises:
        ApiError, ParamError, GrammarError: the request can't be served as asked.
    """
    served, config = target.served, target.config
    notes = notes_on(body, target)
    if body.suffix:
        raise bad_request("suffix needs a model with fill-in-the-middle tokens, which this one lacks.", "suffix")
    num_choices, num_drawn = _numbers(body)
    _check_batch(body, config.max_num_queued_reqs)
    style = logprob_style(body, body.logprobs, "logprobs", config.max_logprobs)
    prompts = await encode_prompts(body.prompt, served, body.add_special_tokens is not False)
    prompts = [await with_replies(prompt, body, served) if prompt.text is not None else prompt for prompt in prompts]
    constraint = await compiled(format_spec(body), served)
    output = OutputPlan(
        num_choices=num_choices,
        text=text_options(body),
        logprobs=style,
        num_prompt_logprobs=body.prompt_logprobs,
        echo_prompt=bool(body.echo),
        return_token_ids=bool(body.return_token_ids),
        explain=explain_style(body, config),
    )
    ask = Ask(prompts, "prompt", _max_tokens(body), num_drawn, num_drawn > num_choices, constraint)
    return build_plan(body, ask, output, arrival, target, notes)


def _numbers(body: CompletionRequest) -> tuple[int, int]:
    """Choices returned and choices drawn, per prompt."""
    num_choices = body.n or 1
    num_drawn = body.best_of or num_choices
    if num_drawn < num_choices:
        raise bad_request(f"best_of ({num_drawn}) must be at least n ({num_choices}).", "best_of")
    if num_drawn > num_choices and body.stream:
        raise bad_request("best_of cannot be streamed: the choices are ranked when all are done.", "best_of")
    return num_choices, num_drawn


def _check_batch(body: CompletionRequest, max_queued: int) -> None:
    if len(body.prompt) > max(1, max_queued):
        message = f"This server takes at most {max_queued} prompts in one request, got {len(body.prompt)}."
        raise bad_request(message, "prompt")


def _max_tokens(body: CompletionRequest) -> Setting:
    if body.max_tokens is None:
        return Setting(DEFAULT_MAX_TOKENS, "server")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens of 0 only makes sense with echo, to score a prompt.", "max_tokens")
    return Setting(body.max_tokens, "request")


async def encode_prompts(prompts: Sequence[PromptItem], served: Served, add_special_tokens: bool) -> list[Prompt]:
    """The token ids of each prompt; long texts are encoded off the event loop."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]

    def work() -> list[list[int]]:
        return [served.tokenizer.encode_rendered(text, add_special_tokens=add_special_tokens) for text in texts]

    encoded = iter(await asyncio.to_thread(work) if sum(map(len, texts)) > THREAD_CHARACTERS else work())
    return [Prompt(next(encoded), prompt) if isinstance(prompt, str) else Prompt(prompt) for prompt in prompts]


class CompletionWire:
    """How completion chunks look, choice by choice."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def top_level(self, opening: Opening) -> dict[str, Any]:
        """What the answer's first chunk carries beside the choice: nothing of its own."""
        return {}

    def open(self, opening: Opening, index: int) -> dict[str, Any] | None:
        """The echoed prompt and what was asked about it; None when nothing was."""
        output = opening.plan.output
        prompt = opening.handle.request.prompt_ids
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if output.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(opening.handle, output.num_prompt_logprobs, opening.tokenizer)
        if output.return_token_ids:
            choice["prompt_token_ids"] = list(prompt)
        if output.echo_prompt:
            text, pieces = echoed_prompt(opening)
            choice["text"] = text
            if output.logprobs is not None:
                choice["logprobs"] = completion_logprobs(pieces, 0, output.logprobs, opening.tokenizer)
        return choice if choice["text"] or len(choice) > 4 else None

    def delta(self, news: News) -> dict[str, Any] | None:
        """A chunk with new text; None when there is nothing to show."""
        output, delta = news.plan.output, news.delta
        wants_tokens = bool(delta.tokens) and output.logprobs is not None
        if not delta.pieces.content and not wants_tokens and not (output.return_token_ids and news.token_ids):
            return None
        choice: dict[str, Any] = {
            "index": news.index,
            "text": delta.pieces.content,
            "logprobs": None,
            "finish_reason": None,
        }
        if output.logprobs is not None and delta.tokens:
            choice["logprobs"] = completion_logprobs(delta.tokens, news.offset, output.logprobs, news.tokenizer)
        if output.return_token_ids:
            choice["token_ids"] = list(news.token_ids)
        return choice

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        """The last chunk of a choice."""
        ends = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        return {"index": index, "text": "", "logprobs": None} | ends


def echoed_prompt(opening: Opening) -> tuple[str, tuple[TokenPiece, ...]]:
    """The prompt as the client wrote it and its tokens, with logprobs where the engine gave them."""
    ids = opening.job.request.prompt_ids
    given = opening.handle.prompt_logprobs
    scores: list[TokenLogprob | None] = [None, *given] if given else [None] * len(ids)
    spaces = opening.plan.output.text.spaces_between_special_tokens
    options = TextOptions(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    text, pieces = prompt_pieces(opening.tokenizer, ids, scores, options)
    written = opening.job.prompt_text
    if written is None or written == text:
        return text, pieces
    # The tokenizer put its own tokens in front; they have no place in what the client wrote.
    num_added = max(0, len(text) - len(written))
    return written, tuple(replace(piece, text_offset=max(0, piece.text_offset - num_added)) for piece in pieces)
