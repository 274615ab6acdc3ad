"""One choice's way from token events to what a client is shown: text, sorted, and its tokens in step with it.

Order: detokenize, stop strings, router (reasoning, then tools). Tokens leave together with the last character of their
text, so logprobs line up with the text whatever was held back, and those whose text a stop string took never leave.
Knows nothing of HTTP or of OpenAI's layouts.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.batch import TokenLogprob
from scheduler.handle import TokenEvent
from server.text.detokenizer import Detokenizer
from server.text.pieces import NO_TEXT, TextPieces, TextRouter
from server.text.stop import StopMatcher
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a request says about its output text.

    Attributes:
        stops: strings that end the output; none empty.
        include_stop: leave the stop string (or the stop token's text) in the output.
        min_tokens: a stop string counts only when a token after that many completes it.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenPiece:
    r"""One token as logprobs show it.

    Attributes:
        text: its own text; `bytes:\xNN...` when it is part of a character only.
        bytes: exact.
        text_offset: where its text begins, in characters of the output text before sorting; part of a character points
            to where the character begins.
    """

    token_id: int
    text: str
    bytes: bytes
    text_offset: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News for a client.

    Attributes:
        pieces: new text, sorted.
        tokens: the tokens this text completes, in order.
        stop_string: the stop string that has just ended the choice.
        finished: set once, on the choice's last delta; everything held back is in it.
    """

    pieces: TextPieces = NO_TEXT
    tokens: tuple[TokenPiece, ...] = ()
    stop_string: str | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token whose text, characters `start` to `end`, has not all been shown."""

    token_id: int
    start: int
    end: int
    logprob: TokenLogprob | None


class ChoiceText:
    """Turns one choice's token events into deltas.

    Attributes:
        num_tokens: completion tokens read, a stop token included; up to the one that completed the stop string.
        num_reasoning_tokens: those of them whose text went to reasoning. A token is counted where the next text that
            the router gives goes, so tags count with what follows them.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, router: TextRouter | None, *, lists_tokens: bool = True
    ) -> None:
        """`lists_tokens` off leaves `ChoiceDelta.tokens` empty: where nobody asks for logprobs, half the work."""
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._options = options
        self._router = router
        self._detokenizer = _detokenizer(tokenizer, options)
        self._stop = StopMatcher(options.stops, options.include_stop)
        self._tokens = _ShownTokens(tokenizer, self._detokenizer) if lists_tokens else None
        self._num_shown = 0  # characters that passed the stop matcher
        self._num_unsorted = 0  # tokens read since the router last gave text
        self._finished = False

    def push(self, event: TokenEvent) -> ChoiceDelta:
        """Take an event; after a stop string matched or the choice finished, later ones change nothing."""
        if self._finished:
            return ChoiceDelta()
        pieces = NO_TEXT
        for index in range(len(event.token_ids)):
            shown = self._show(self._read(event, index))
            pieces = pieces + shown if pieces else shown
            if self._stop.matched is not None:
                break
        self._finished = self._stop.matched is not None or event.finish_reason is not None
        if self._finished:
            pieces += self._end()
        return ChoiceDelta(pieces, self._released(), self._stop.matched, self._finished)

    def _is_hidden(self, event: TokenEvent, index: int) -> bool:
        """Whether this is the stop token that ended the choice; its text is not output unless asked for."""
        if event.stop_token_id is None or self._options.include_stop:
            return False
        return index == len(event.token_ids) - 1 and event.token_ids[index] == event.stop_token_id

    def _read(self, event: TokenEvent, index: int) -> str:
        """Detokenize one token and look for stop strings; gives the text that may be shown."""
        self.num_tokens += 1
        self._num_unsorted += 1
        token_id, is_hidden = event.token_ids[index], self._is_hidden(event, index)
        if self._tokens is not None:
            text = self._tokens.read(token_id, event.logprobs[index] if event.logprobs else None, hidden=is_hidden)
        else:
            text = "" if is_hidden else self._detokenizer.push(token_id)
        return "" if is_hidden else self._stop.push(text, honour=self.num_tokens > self._options.min_tokens)

    def _show(self, text: str) -> TextPieces:
        self._num_shown += len(text)
        if not text:
            return NO_TEXT
        return TextPieces(text) if self._router is None else self._sorted(self._router.push(text))

    def _end(self) -> TextPieces:
        """Everything held back, in order: an unfinished character, a stop string's beginning, the router's rest."""
        pieces = NO_TEXT
        if self._stop.matched is None:
            honour = self.num_tokens > self._options.min_tokens
            pieces = self._show(self._stop.push(self._detokenizer.flush(), honour=honour))
            pieces += self._show(self._stop.flush())
        return pieces if self._router is None else pieces + self._sorted(self._router.flush())

    def _sorted(self, pieces: TextPieces) -> TextPieces:
        """Count the tokens read since the last text as reasoning, if this text mostly is."""
        if pieces:
            num_called = sum(len(call.name or "") + len(call.arguments) for call in pieces.tool_calls)
            if len(pieces.reasoning) > len(pieces.content) + num_called:
                self.num_reasoning_tokens += self._num_unsorted
            self._num_unsorted = 0
        return pieces

    def _released(self) -> tuple[TokenPiece, ...]:
        """The tokens whose text has been shown; at the end, all but those that the stop string took whole."""
        if self._tokens is None:
            return ()
        everything = self._finished and self._stop.matched is None
        return tuple(self._tokens.release(self._num_shown, cut=self._finished, everything=everything))


class _ShownTokens:
    """The tokens of one choice, each kept until all of its text has been shown."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._waiting: deque[_Waiting] = deque()

    def read(self, token_id: int, logprob: TokenLogprob | None, *, hidden: bool) -> str:
        """Detokenize one token, unless it is hidden, and note which characters are its own."""
        detokenizer = self._detokenizer
        if hidden:
            start, text = detokenizer.num_chars + detokenizer.num_pending, ""
            end = start
        else:
            start, text = detokenizer.start_of(token_id), detokenizer.push(token_id)
            end = max(start, detokenizer.num_chars + detokenizer.num_pending)
        self._waiting.append(_Waiting(token_id, start, end, logprob))
        return text

    def release(self, num_shown: int, *, cut: bool, everything: bool) -> Iterator[TokenPiece]:
        """Those within the first `num_shown` characters; with `cut` also the one that these end in."""
        while self._waiting:
            token = self._waiting[0]
            is_cut = cut and token.start < num_shown
            if not (everything or is_cut or token.end <= num_shown):
                break
            self._waiting.popleft()
            yield _piece(self._tokenizer, token.token_id, token.start, token.logprob)


def prompt_pieces(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    options: TextOptions,
) -> tuple[str, tuple[TokenPiece, ...]]:
    """An echoed prompt: its text and its tokens with their places in it. `logprobs` has one entry per token."""
    detokenizer = _detokenizer(tokenizer, options)
    starts, parts = [], []
    for token_id in token_ids:
        starts.append(detokenizer.start_of(token_id))
        parts.append(detokenizer.push(token_id))
    text = "".join(parts) + detokenizer.flush()
    whole = tokenizer.decode(
        token_ids,
        skip_special_tokens=options.skip_special_tokens,
        spaces_between_special_tokens=options.spaces_between_special_tokens,
    )
    num_leading = len(text) - len(whole)  # spaces that encoding put in front
    pieces = [
        _piece(tokenizer, token_id, max(0, start - num_leading), logprob)
        for token_id, start, logprob in zip(token_ids, starts, logprobs, strict=True)
    ]
    return whole, tuple(pieces)


def _detokenizer(tokenizer: Tokenizer, options: TextOptions) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        skip_special_tokens=options.skip_special_tokens,
        spaces_between_special_tokens=options.spaces_between_special_tokens,
    )


def _piece(tokenizer: Tokenizer, token_id: int, offset: int, logprob: TokenLogprob | None) -> TokenPiece:
    return TokenPiece(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), offset, logprob)
