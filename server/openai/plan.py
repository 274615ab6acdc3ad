"""A translated request: everything the answer needs, decided before anything is queued. Frozen values only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.request import Request
from server.openai.explain import ExplainStyle
from server.text.choice import TextOptions
from server.text.pieces import TextRouter
from server.text.replies import ReplySite


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the request that continues it.

    Attributes:
        first_index: of its choices in the answer.
        prompt_text: what the client wrote; None when that were ids, or when it was truncated.
        reply_site: where the tokens of its answers are remembered; None when they are not.
    """

    request: Request
    first_index: int
    prompt_text: str | None
    reply_site: ReplySite | None = None


@dataclass(frozen=True, slots=True)
class LogprobStyle:
    """How logprobs are written.

    `num_top` alternatives per token, and `extra_ids` besides; tokens as text or (`as_ids`) as `token_id:N`.
    """

    num_top: int
    extra_ids: tuple[int, ...] = ()
    as_ids: bool = False


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """What a stream carries besides the answer."""

    include_usage: bool = False
    continuous_usage: bool = False
    obfuscate: bool = False


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answer is written down.

    Attributes:
        num_choices: answers per prompt that are returned; the requests may draw more (`best_of`).
        logprobs: None when not asked for.
        num_prompt_logprobs: alternatives per prompt token, None when not asked for.
        echo_prompt: begin each answer with its prompt (completions).
        echo_text: text to begin each answer with (chat).
        make_router: a fresh router per choice, or None.
        reports_reasoning: whether usage counts reasoning tokens.
        has_prediction: whether usage counts predicted tokens.
        explain: how much is told of the prefix cache; None when not asked.
    """

    num_choices: int
    text: TextOptions
    logprobs: LogprobStyle | None = None
    num_prompt_logprobs: int | None = None
    echo_prompt: bool = False
    echo_text: str = ""
    return_token_ids: bool = False
    make_router: Callable[[], TextRouter] | None = None
    reports_reasoning: bool = False
    has_prediction: bool = False
    explain: ExplainStyle | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request, translated.

    Attributes:
        stream: None for a whole answer.
        report: the `sampling` field: setting -> value and source.
        warnings: what was not taken as given.
        headers: to send with the answer.
    """

    jobs: tuple[Job, ...]
    output: OutputPlan
    stream: StreamStyle | None
    model: str
    report: Mapping[str, Any]
    warnings: tuple[Mapping[str, Any], ...]
    headers: Mapping[str, str]

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts, each counted once."""
        return sum(len(job.request.prompt_ids) for job in self.jobs)

    @property
    def num_drawn(self) -> int:
        """Choices drawn per prompt."""
        return self.jobs[0].request.num_choices
