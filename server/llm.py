"""A model in this process, without a server: `LLM(...).generate(prompts)` and `.chat(messages)`.

The same engine, scheduler and translation as behind HTTP, so every request field of the API works here and means the
same. Knows how to run their event loop in a thread of its own; knows no tensors and no sockets.
"""

import asyncio
import json
import os
import sys
import threading
import uuid
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from engine.config import EngineInfo
from server.config import ServerConfig
from server.errors import EXPECTED, ApiError, as_api_error, bad_request
from server.flags import settings_from
from server.openai.answer import answer_head, folded
from server.openai.body import decode
from server.openai.chat import ChatWire, plan_chat
from server.openai.completions import CompletionWire, plan_completion
from server.openai.generation import Generation
from server.openai.plan import Plan
from server.openai.schema.requests import ChatRequest, CompletionRequest
from server.openai.settings import SeedSource
from server.openai.translate import Arrival, Target
from server.openai.wire import WireForm
from server.openmp import tame_thread_barriers
from server.progress import LoadProgress
from server.state import Served
from server.text.tokenizer import Tokenizer

Body = Mapping[str, Any]
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Result = TypeVar("Result")

NO_QUEUE_BOUND = 2**31
"""Nobody is told to come back later: requests are read lazily, so that few wait at once anyway."""


class RequestError(ValueError):
    """A request that cannot be answered as asked. `param` is the field at fault, `status` what HTTP would say."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.param = error.param
        self.status = error.status


@dataclass(frozen=True, slots=True)
class Output:
    """One choice of an answer. `message` is the whole assistant message of a chat, None for a completion."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: Any
    message: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt got; `body` is the whole answer as the HTTP API would give it."""

    outputs: tuple[Output, ...]
    usage: Mapping[str, Any]
    body: Body

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text


class LLM:
    """A loaded model. Settings are those of `quire serve`, by name: `LLM("org/model", dtype="float32")`.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: ServerConfig | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        """Load the model (the embedded one when None); `progress` shows loading and batches on standard error.

        `config` takes the place of model and settings. Bounds of the queue have no meaning here and do not apply.

        Raises:
            ConfigError: a setting that cannot be used.
            LoadError: the model cannot be loaded as asked.
        """
        config = config or settings_from(ServerConfig, {**settings, "model": model})
        config = replace(config, max_num_queued_reqs=NO_QUEUE_BOUND, max_num_queued_tokens=None, queue_timeout=None)
        tame_thread_barriers(os.environ)
        from server import build

        self._progress = progress
        reporter = LoadProgress(lambda phase, fraction: None, sys.stderr)
        try:
            self._loaded = build.load(config, reporter if progress else lambda phase, fraction: None)
        finally:
            reporter.close()
        self._window = 4 * self._loaded.engine_config.max_num_seqs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        self._thread.start()
        self._served = self._run(self._start(config))
        self._target = Target(self._served, config, SeedSource(config.seed))

    async def _start(self, config: ServerConfig) -> Served:
        from server.build import assemble

        served = assemble(self._loaded, config)
        self._serving = asyncio.create_task(served.scheduler.run())
        return served

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def info(self) -> EngineInfo:
        """What was loaded: sizes, number types, the KV pool."""
        return self._loaded.engine.info

    def generate(self, prompts: Prompt | Sequence[Prompt], **params: Any) -> list[Answer]:
        """Continue each prompt (a text or token ids); `params` are fields of a completion request.

        Raises:
            RequestError: a prompt or field that cannot be used.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: list[Any] = [prompts] if single else list(prompts)
        return self._all([{**params, "prompt": _plain(prompt)} for prompt in several])

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]], **params: Any) -> list[Answer]:
        """Answer one conversation or several; `params` are fields of a chat request.

        Raises:
            RequestError: a conversation or field that cannot be used.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        return self._all([{**params, "messages": list(conversation)} for conversation in conversations])

    def answers(self, bodies: Iterable[Body]) -> Iterator[Body | ApiError]:
        """Answer request bodies, with `messages` or `prompt`, in order; an error takes the place of its answer.

        Bodies are read lazily, as fast as they are answered.
        """
        waiting: deque[Future[Body | ApiError]] = deque()
        try:
            for body in bodies:
                waiting.append(asyncio.run_coroutine_threadsafe(self._answer(body), self._loop))
                if len(waiting) >= self._window:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Cancel what runs and give the memory back; harmless when done before."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._served.scheduler.stop)
        self._run(self._stopped())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._served.structured.close()
        self._loaded.engine.close()

    def __enter__(self) -> "LLM":
        """The model itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _stopped(self) -> None:
        await self._serving

    def _all(self, bodies: Sequence[Body]) -> list[Answer]:
        results = []
        for answer in tqdm(self.answers(bodies), total=len(bodies), unit="prompt", disable=not self._progress):
            if isinstance(answer, ApiError):
                raise RequestError(answer)
            results.append(_typed(answer))
        return results

    async def _answer(self, body: Body) -> Body | ApiError:
        """The answer, or what is wrong with the request (a value, so that one bad line ends nobody else's)."""
        try:
            form, plan = await self._plan(body)
            generation = Generation(plan, form, self._served, lambda _: None)
            try:
                return await folded(generation, answer_head(plan, form, self._served, form.whole_object))
            finally:
                generation.close()
        except EXPECTED as error:
            return as_api_error(error)

    async def _plan(self, body: Body) -> tuple[WireForm, Plan]:
        if body.get("stream"):
            raise bad_request("stream has no meaning here: answers are given whole.", "stream")
        raw = _encoded(body)
        arrival = Arrival(f"llm-{uuid.uuid4().hex}", self._served.clock.now())
        if "messages" in body:
            return ChatWire(), await plan_chat(decode(raw, ChatRequest), arrival, self._target)
        return CompletionWire(), await plan_completion(decode(raw, CompletionRequest), arrival, self._target)


def _plain(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _encoded(body: Body) -> bytes:
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_request(f"The request cannot be written as JSON: {error}") from error


def _typed(body: Body) -> Answer:
    outputs = []
    for choice in body["choices"]:
        message = choice.get("message")
        text = choice["text"] if message is None else message.get("content") or ""
        outputs.append(
            Output(text, choice["finish_reason"], choice.get("stop_reason"), choice.get("logprobs"), message)
        )
    return Answer(tuple(outputs), body["usage"], body)
