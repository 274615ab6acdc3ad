"""What the pipeline hands to a wire form (chat or completions), and what a wire form is."""

from dataclasses import dataclass
from typing import Any, Protocol

from scheduler.handle import RequestHandle
from server.openai.plan import Job, Plan
from server.text.choice import ChoiceDelta
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Opening:
    """A prompt's answer begins; prompt logprobs are complete."""

    plan: Plan
    job: Job
    handle: RequestHandle
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class News:
    """New text of one choice.

    Attributes:
        token_ids: the tokens just read, stop tokens included.
        offset: characters in front of the answer's own text (an echoed prompt).
    """

    plan: Plan
    index: int
    delta: ChoiceDelta
    token_ids: tuple[int, ...]
    offset: int
    tokenizer: Tokenizer


@dataclass(slots=True)
class Chunk:
    """One event of an answer: choices, and fields of the answer itself."""

    choices: list[dict[str, Any]]
    fields: dict[str, Any]


class WireForm(Protocol):
    """How one endpoint writes its chunks. Stateless."""

    id_prefix: str
    chunk_object: str
    whole_object: str

    def top_level(self, opening: Opening) -> dict[str, Any]:
        """What the answer's first chunk carries beside the choice."""

    def open(self, opening: Opening, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice; None when there is nothing to open it with."""

    def delta(self, news: News) -> dict[str, Any] | None:
        """A chunk with new text; None when there is nothing to show."""

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        """The last chunk of a choice."""
