"""One HTTP request's generation: from queued requests to the chunks of its answer.

The one pipeline behind streamed and whole answers. Knows handles, choice texts and a wire form; refuses to know HTTP.
However it is left, `close` cancels what still runs and settles the books once.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from engine.errors import NO_TOKEN_LEFT
from scheduler.errors import EngineFailed, SchedulerError
from scheduler.handle import RequestHandle, TokenEvent
from scheduler.request import FinishReason
from server.errors import EXPECTED, ApiError, bad_request
from server.openai.explain import CACHE_EXPLAIN, explanations
from server.openai.plan import Job, Plan
from server.openai.usage import timings, usage
from server.openai.wire import Chunk, News, Opening, WireForm
from server.state import Served
from server.text.choice import ChoiceText
from server.text.pieces import ToolCallDelta
from server.text.tools.envelope import object_text

DEADLINE_STOP = "deadline_exceeded"
"""`stop_reason` of a choice that its deadline cut short; its `finish_reason` is `length`."""

CONSTRAINT_FAILED = "the constraint failed: "
"""How `RowOutput.error` begins when a grammar that compiled goes beyond what can be held to it."""

_GRAVITY = ("failed", "deadline", "cancelled", "length", "tool_calls", "stop")
"""Of several choices' ends, the first of these counts for the request."""


@dataclass(slots=True)
class Choice:
    """One choice while it is written."""

    index: int
    text: ChoiceText
    offset: int = 0
    arguments: str = ""
    is_done: bool = False
    token_ids: list[int] = field(default_factory=list)
    sum_logprobs: float = 0.0
    num_logprobs: int = 0

    def hear(self, calls: Sequence[ToolCallDelta]) -> None:
        """Keep the arguments of the last tool call."""
        for call in calls:
            self.arguments = call.arguments if call.call_id is not None else self.arguments + call.arguments

    @property
    def has_called(self) -> bool:
        """Whether it made tool calls, and its end did not cut the last one: half a call can't be carried out."""
        return bool(self.arguments) and object_text(self.arguments) is not None

    @property
    def score(self) -> float:
        """Mean logprob of its tokens, by which `best_of` ranks."""
        return self.sum_logprobs / self.num_logprobs if self.num_logprobs else 0.0


class Generation:
    """The running requests of one plan, and their answer."""

    def __init__(self, plan: Plan, form: WireForm, served: Served, on_close: Callable[["Generation"], None]) -> None:
        """Queue everything, or nothing.

        Raises:
            RequestRefused: one of the requests was not let in.
        """
        self.plan = plan
        self.form = form
        self._served = served
        self._on_close = on_close
        self._ends: list[str] = []
        self._is_open = True
        self.handles: list[RequestHandle] = []
        try:
            for job in plan.jobs:
                self.handles.append(served.scheduler.submit(job.request))
        except SchedulerError:
            self._cancel()
            raise
        self.choices = [
            [self._choice(job.first_index + number) for number in range(job.request.num_choices)] for job in plan.jobs
        ]

    def _choice(self, index: int) -> Choice:
        output = self.plan.output
        router = output.make_router() if output.make_router else None
        lists_tokens = output.logprobs is not None
        return Choice(index, ChoiceText(self._served.tokenizer, output.text, router, lists_tokens=lists_tokens))

    @property
    def finish_reason(self) -> str:
        """The gravest end of its choices, for the counter; "cancelled" when left before the end."""
        ends = self._ends if len(self._ends) == sum(map(len, self.choices)) else [*self._ends, "cancelled"]
        return min(ends, key=_GRAVITY.index)

    @property
    def num_output_tokens(self) -> int:
        """Completion tokens of all choices so far."""
        return sum(choice.text.num_tokens for choices in self.choices for choice in choices)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close; a fault of ours ends it as failed, not as cancelled."""
        if isinstance(error, Exception) and not isinstance(error, EXPECTED):
            self._ends.append("failed")
        self.close()

    def close(self) -> None:
        """Nobody listens any more, or all is done; harmless when closed before."""
        if self._is_open:
            self._is_open = False
            self._cancel()
            for job, choices in zip(self.plan.jobs, self.choices, strict=True):
                for choice in choices:
                    if not choice.is_done:
                        self._remember(job, choice)
            self._on_close(self)

    def _cancel(self) -> None:
        for handle in self.handles:
            if not handle.is_done:
                handle.cancel()

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks; the last one has no choices and the usage.

        Raises:
            ApiError, EngineFailed: the generation failed, was cut off by the server, or its deadline passed too early.
        """
        fields: dict[str, Any] = {"sampling": self.plan.report}
        if self.plan.warnings:
            fields["warnings"] = list(self.plan.warnings)
        async with aclosing(self._written()) as written:
            async for chunk in written:
                if fields:
                    chunk.fields, fields = {**fields, **chunk.fields}, {}
                yield chunk
        if self.plan.output.explain is not None:
            fields[CACHE_EXPLAIN] = explanations(self, self._served.tokenizer)
        yield Chunk([], {**fields, "usage": usage(self), "timings": timings(self.handles)})

    async def _written(self) -> AsyncGenerator[Chunk, None]:
        opened: set[int] = set()
        async with aclosing(self._events()) as batches:
            async for number, events in batches:
                job, handle = self.plan.jobs[number], self.handles[number]
                if number not in opened:
                    self._check_first(handle, events)
                    opened.add(number)
                    for chunk in self._open(Opening(self.plan, job, handle, self._served.tokenizer), number):
                        yield chunk
                for event in events:
                    for choice in self._write(job, handle, self.choices[number][event.choice], event):
                        yield Chunk([choice], {})

    async def _events(self) -> AsyncGenerator[tuple[int, list[TokenEvent]], None]:
        """Events of all prompts as they come, with the prompt's number."""
        if len(self.handles) == 1:
            async for events in self.handles[0]:
                yield 0, events
            return
        async with aclosing(merged(self.handles)) as batches:
            async for item in batches:
                yield item

    def _check_first(self, handle: RequestHandle, events: list[TokenEvent]) -> None:
        """A deadline that passed before the first token has no answer to cut short."""
        if handle.times.first_token_s is None and any(e.finish_reason is FinishReason.DEADLINE for e in events):
            self._ends.append("deadline")
            where = "began" if handle.times.scheduled_s is None else "gave its first token"
            waited_s = (handle.times.finished_s or handle.times.arrived_s) - handle.times.arrived_s
            message = f"The request's deadline passed before it {where}, {waited_s:.3f} s after it was queued."
            raise ApiError(504, message, code="deadline_exceeded")

    def _open(self, opening: Opening, number: int) -> list[Chunk]:
        fields = self.form.top_level(opening)
        chunks = []
        for choice in self.choices[number]:
            opened = self.form.open(opening, choice.index)
            if opened is not None:
                choice.offset = len(opened.get("text", ""))
                chunks.append(Chunk([opened], fields))
                fields = {}
        return chunks

    def _write(self, job: Job, handle: RequestHandle, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        """What one event adds to the answer: a delta, a finish, both or nothing."""
        if choice.is_done:
            return []  # tokens that were under way when a stop string ended the choice
        if event.finish_reason is FinishReason.FAILED:
            self._ends.append("failed")
            raise _failure(event.error)
        if event.finish_reason is FinishReason.CANCELLED:
            raise ApiError(503, "The server shut down before the answer was finished.", code="draining")
        num_before = choice.text.num_tokens
        delta = choice.text.push(event)
        token_ids = event.token_ids[: choice.text.num_tokens - num_before]
        choice.token_ids += token_ids
        for logprob in event.logprobs[: len(token_ids)]:
            choice.sum_logprobs += logprob.logprob
            choice.num_logprobs += 1
        choice.hear(delta.pieces.tool_calls)
        news = News(self.plan, choice.index, delta, token_ids, choice.offset, self._served.tokenizer)
        shown = self.form.delta(news)
        chunks = [shown] if shown is not None else []
        if delta.finished:
            if delta.stop_string is not None and event.finish_reason is None:
                handle.finish(event.choice)
            self._remember(job, choice)
            chunks.append(self._end(choice, event, delta.stop_string))
        return chunks

    def _remember(self, job: Job, choice: Choice) -> None:
        """Keep the tokens of what the client has got, before it can send the text back."""
        if job.reply_site is not None and self._served.replies is not None:
            self._served.replies.remember(job.reply_site, choice.token_ids)

    def _end(self, choice: Choice, event: TokenEvent, stop_string: str | None) -> dict[str, Any]:
        choice.is_done = True
        if event.finish_reason is FinishReason.DEADLINE and stop_string is None:
            self._ends.append("deadline")
            return self.form.finish(choice.index, "length", DEADLINE_STOP)
        is_cut = stop_string is None and event.finish_reason is FinishReason.LENGTH
        reason = "length" if is_cut else "tool_calls" if choice.has_called else "stop"
        self._ends.append(reason)
        return self.form.finish(choice.index, reason, self._stop_reason(event, stop_string))

    def _stop_reason(self, event: TokenEvent, stop_string: str | None) -> str | int | None:
        """The stop string, or the stop token when it is not one of the model's own end tokens."""
        if stop_string is not None:
            return stop_string
        return None if event.stop_token_id in self._served.stop_token_ids else event.stop_token_id


def _failure(error: str | None) -> Exception:
    """What a failed choice means: its request contradicts itself, or something broke."""
    if error == NO_TOKEN_LEFT:
        return bad_request("The request's bans, allowed tokens and grammar together leave no token to choose from.")
    if error is not None and error.startswith(CONSTRAINT_FAILED):
        return bad_request(f"The request's grammar asks for too much: {error.removeprefix(CONSTRAINT_FAILED)}")
    return EngineFailed(error or "")


async def merged(handles: list[RequestHandle]) -> AsyncGenerator[tuple[int, list[TokenEvent]], None]:
    """The events of several handles as they come, each with its handle's number."""
    queue: asyncio.Queue[tuple[int, list[TokenEvent] | None]] = asyncio.Queue()

    async def pump(number: int, handle: RequestHandle) -> None:
        async for events in handle:
            queue.put_nowait((number, events))
        queue.put_nowait((number, None))

    tasks = [asyncio.create_task(pump(number, handle)) for number, handle in enumerate(handles)]
    try:
        num_open = len(tasks)
        while num_open:
            number, events = await queue.get()
            if events is None:
                num_open -= 1
            else:
                yield number, events
    finally:
        for task in tasks:
            task.cancel()
