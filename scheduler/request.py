"""What a caller asks for, and how it may end. Token ids only: text was dealt with before."""

from dataclasses import dataclass
from enum import StrEnum

from engine.sampling.constraint import Constraint
from engine.sampling.params import SamplingParams


class FinishReason(StrEnum):
    """How a sequence ended."""

    STOP = "stop"  # a stop token, a stop string (through `finish`), or a complete grammar
    LENGTH = "length"  # max_tokens or the context's end
    CANCELLED = "cancelled"  # the caller went away
    DEADLINE = "deadline"  # its deadline, or its allowed time in the queue, passed
    FAILED = "failed"  # the engine failed


class PreemptionReason(StrEnum):
    """Why a running sequence lost its blocks."""

    OUTRANKED = "outranked"  # one ahead of it needed them
    GAVE_WAY = "gave_way"  # it needed more, and nobody behind it could be asked


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and everything that decides its continuation(s). Immutable.

    Attributes:
        request_id: unique among live requests; shown in logs.
        prompt_ids: at least one token.
        max_tokens: output tokens per choice; 0 only scores the prompt.
        num_choices: independent continuations that share the prompt's blocks.
        priority: lower is served first (only under the priority policy), then arrival order.
        deadline_s: on the scheduler's clock; a choice still unfinished then ends with DEADLINE.
        queue_deadline_s: on the scheduler's clock; DEADLINE when no step has begun by then.
        cache_namespace: what keeps its KV apart from that of other requests (see `kvpool.prefix.namespace_root`).
        cache_scope: the namespace without the caller's salt; only explanations of misses tell the two apart.
        use_prefix_cache: False recomputes the whole prompt (prompt logprobs imply it).
        explain_cache: tell in the handle why no more of the prompt was found in the prefix cache.
        pin_key: keeps the prompt's blocks under pressure, within the pin budget; None pins nothing.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    num_choices: int = 1
    priority: int = 0
    deadline_s: float | None = None
    queue_deadline_s: float | None = None
    cache_namespace: bytes = b""
    cache_scope: bytes = b""
    use_prefix_cache: bool = True
    pin_key: str | None = None
    explain_cache: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a request needs at least one prompt token")
        if self.max_tokens < 0 or self.num_choices < 1:
            raise ValueError("max_tokens must be at least 0 and num_choices at least 1")
