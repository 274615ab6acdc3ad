"""Structured output: what an answer must look like (`GrammarSpec`) compiled into what the engine can enforce.

Knows: llguidance's compiler and matchers, and their bounds. Refuses to know: HTTP, tool dialects, logits.

    GrammarSpec --compile()--> GrammarConstraint (shared, immutable) --start()--> GrammarState (one per sequence)
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.sampling.constraint import Bitmask
from server.text.grammar_source import GrammarTokenizer, grammar_source, json_source
from server.text.grammar_spec import EmbeddedSchema, GrammarError, GrammarSpec, ReasoningPrefix
from server.text.json_schema import SchemaError, blame, check_schema

__all__ = [
    "CompilerBusy",
    "GrammarConstraint",
    "GrammarError",
    "GrammarSpec",
    "GrammarState",
    "ReasoningPrefix",
    "StructuredCompiler",
]


NUM_THREADS = 2
"""Grammars compiled at once."""

_REFUSED = "doesn't satisfy the grammar"  # llguidance of a token; whatever else it says is a limit


class CompilerBusy(Exception):
    """Other grammars kept all threads for too long; nothing is wrong with this one.

    Attributes:
        num_pending: grammars that are compiled or wait for it.
        retry_after_s: after that long, those that are compiled now have been given up.
    """

    def __init__(self, num_pending: int, retry_after_s: float) -> None:
        super().__init__(f"The server is busy with other grammars ({num_pending} of them); retry later.")
        self.num_pending = num_pending
        self.retry_after_s = retry_after_s


class GrammarState:
    """One sequence's place in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._ended = False

    def fill_mask(self, out: Bitmask) -> None:
        """Write into `out` [ceil(vocab_size / 32)] which tokens may come next; none at all when `error` is set."""
        assert out.dtype == np.int32, "a mask is int32"
        assert out.flags.c_contiguous, "a mask row is contiguous"
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        if self._matcher.is_error():
            out.fill(0)

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over accepted tokens; False when the grammar does not allow one of them.

        A stop token ends the answer where the grammar may end. The matcher sees it only where the grammar names it:
        once nothing more can follow, it takes no token at all.

        Raises:
            ValueError: the grammar's own mask had allowed the token, but the grammar can't be followed any further.
        """
        ends = bool(token_ids) and token_ids[-1] in self._stop_token_ids
        text_ids = list(token_ids[:-1] if ends else token_ids)
        if text_ids and not self._consume(text_ids):
            return False
        if ends and not self._matcher.is_accepting():
            if not self._consume([token_ids[-1]]):
                return False
            if not self._matcher.is_accepting():
                raise ValueError("it goes on after a stop token, and that ends every answer")
        self._ended = ends
        return True

    def _consume(self, token_ids: list[int]) -> bool:
        if self._matcher.consume_tokens(token_ids):
            return True
        if self.error is not None and _REFUSED not in self.error:
            raise ValueError(self.error)
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether the grammar is complete and nothing more may follow."""
        return self._ended or (bool(self._matcher.is_stopped()) and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why no token is allowed any more: a refused token, or a limit of the grammar engine."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarConstraint:
    """A compiled grammar, shared by all sequences that use it. Starting costs a few microseconds."""

    def __init__(self, matcher: LLMatcher, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids

    def start(self) -> GrammarState:
        """A fresh state at the grammar's beginning."""
        return GrammarState(self._matcher.deep_copy(), self._stop_token_ids)


class StructuredCompiler:
    """Compiles grammars for one tokenizer: off the event loop, bounded in size and time, once per spec."""

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        *,
        max_schema_bytes: int = 1 << 18,
        timeout_s: float = 10.0,
        cache_size: int = 256,
    ) -> None:
        """`vocab_size` is the model's (masks are that wide); at least one stop token is needed to end an answer.

        Raises:
            ValueError: no stop token lies inside the vocabulary.
        """
        self._tokenizer = tokenizer
        self._ll_tokenizer = _ll_tokenizer(tokenizer, vocab_size, stop_token_ids)
        self._stop_token_ids = stop_token_ids
        self._mask_words = (vocab_size + 31) // 32
        self._max_schema_bytes = max_schema_bytes
        self._timeout_s = timeout_s
        self._cache_size = cache_size
        self._cache: OrderedDict[GrammarSpec, GrammarConstraint] = OrderedDict()
        self._pending: dict[GrammarSpec, asyncio.Task[GrammarConstraint]] = {}
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._threads = asyncio.Semaphore(NUM_THREADS)

    async def compile(self, spec: GrammarSpec) -> GrammarConstraint:
        """The constraint for `spec`, from the cache or compiled in a thread; callers of one spec share the work.

        Raises:
            GrammarError: wrong, unsupported, too big or too slow to compile.
            CompilerBusy: no thread was free in time.
        """
        if spec in self._cache:
            self._cache.move_to_end(spec)
            return self._cache[spec]
        if spec.num_bytes > self._max_schema_bytes:
            raise GrammarError(f"the grammar is larger than {self._max_schema_bytes} bytes", spec.param)
        task = self._pending.get(spec)
        if task is None:
            task = self._pending[spec] = asyncio.create_task(self._build(spec))
            task.add_done_callback(lambda done: self._settle(spec, done))
        try:
            return await asyncio.shield(task)
        except GrammarError as error:
            raise GrammarError(error.message, error.param or spec.param, error.path) from None

    def close(self) -> None:
        """Take no more work; what is being compiled is left to finish on its own."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _build(self, spec: GrammarSpec) -> GrammarConstraint:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._threads.acquire()
        except TimeoutError:
            raise CompilerBusy(len(self._pending), self._timeout_s) from None
        work = asyncio.get_running_loop().run_in_executor(self._executor, self.compile_now, spec)
        work.add_done_callback(self._thread_done)
        try:
            # Shielded, because a thread can't be stopped: only what has ended makes room.
            return await asyncio.wait_for(asyncio.shield(work), self._timeout_s)
        except TimeoutError:
            raise GrammarError(f"the grammar takes longer than {self._timeout_s:g} s to compile") from None

    def _thread_done(self, work: asyncio.Future[GrammarConstraint]) -> None:
        self._threads.release()
        if not work.cancelled():
            work.exception()  # looked at here, in case nobody waits for it any more

    def _settle(self, spec: GrammarSpec, task: asyncio.Task[GrammarConstraint]) -> None:
        del self._pending[spec]
        if task.cancelled() or task.exception() is not None:
            return
        self._cache[spec] = task.result()
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def compile_now(self, spec: GrammarSpec) -> GrammarConstraint:
        """Compile in this thread, past cache and bounds. Raises GrammarError."""
        for schema in _schemas(spec):
            self._check_schema(schema)
        try:
            source = grammar_source(spec, self._tokenizer)
        except ValueError as error:
            raise GrammarError(_first_line(str(error))) from None
        matcher, message = self._matcher(source)
        if message is None:
            return GrammarConstraint(matcher, self._stop_token_ids)
        for schema in _schemas(spec):
            self._blame_schema(schema)
        raise GrammarError(message)

    def _matcher(self, source: str) -> tuple[LLMatcher, str | None]:
        """A matcher, and why it is unusable if it is. Some grammars fail only when asked for their first mask."""
        matcher = LLMatcher(self._ll_tokenizer, source, log_level=0, limits=_limits())
        message = matcher.get_error()
        if not message:
            probe = np.zeros(self._mask_words, dtype=np.int32)
            first = matcher.deep_copy()
            first.unsafe_compute_mask_ptr(probe.ctypes.data, probe.nbytes)
            message = first.get_error() or ("" if probe.any() else "the grammar allows no answer")
            if first.stop_reason() == "InternalError":
                message = "the grammar allows no answer"
        return matcher, _first_line(message) if message else None

    def _check_schema(self, schema: EmbeddedSchema) -> None:
        try:
            check_schema(json.loads(schema.schema))
        except SchemaError as error:
            raise GrammarError(str(error), schema.param, error.path or None) from None

    def _blame_schema(self, schema: EmbeddedSchema) -> None:
        """Raise for this schema if it is what does not compile, with the place in it."""

        def fails(part: Mapping[str, Any]) -> str | None:
            return self._matcher(json_source(json.dumps(part)))[1]

        error = blame(json.loads(schema.schema), fails)
        if error is not None:
            raise GrammarError(str(error), schema.param, error.path or None)


class _Vocabulary:
    """The vocabulary in the shape llguidance reads it: the bytes of each id, padded to the model's vocabulary."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_id: int) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in tokenizer.special_ids}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly `text` (which a grammar forces): the tokenizer's own where it gives such."""
        if not isinstance(text, str):
            raise TypeError("text only")  # llguidance asks once with bytes, and sends text after this answer
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        same = b"".join(self.tokens[i] for i in ids) == text.encode() and self._special_ids.isdisjoint(ids)
        return ids if same else self._greedy(text.encode())

    def _greedy(self, data: bytes) -> list[int]:
        """Longest tokens first, for tokenizers that add or fold characters; stops where no token fits."""
        ids: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def _ll_tokenizer(tokenizer: GrammarTokenizer, vocab_size: int, stop_token_ids: frozenset[int]) -> LLTokenizer:
    stops = sorted(i for i in stop_token_ids if 0 <= i < vocab_size)
    if not stops:
        raise ValueError("structured output needs at least one stop token inside the vocabulary")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, stops[0])), eos_token=stops)


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_grammar_size=200_000, initial_lexer_fuel=2_000_000, max_lexer_states=100_000, verbose_errors=False
    )


def _schemas(spec: GrammarSpec) -> tuple[EmbeddedSchema, ...]:
    if spec.kind == "json_schema":
        return (EmbeddedSchema("start", spec.payload, spec.param),)
    return spec.schemas


def _first_line(message: str) -> str:
    """An engine message without its dump of internal state, short enough to show."""
    head = message.split("\n<state", 1)[0].replace("<non-verbose/>", "").strip()
    return " ".join(head.split())[:400]
