"""One step, from a `Batch` to its rows' outputs: the place where model, pool, attention and sampler meet.

Order, fixed: slots start, blocks are copied, inputs are laid out, grammar masks begin on their side thread, the model
runs, prompt tokens are scored, rows sample. Knows one thread and no requests; a step's errors are the engine's to name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, Row, RowOutput, SlotStart, TokenLogprob
from engine.config import Progress
from engine.graphs import DecodeGraphs
from engine.inputs import InputBuilder, PromptScores, StepInputs
from engine.models.decoder import Decoder
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampled, Sampler
from kvpool.storage import KVStorage
from kvpool.transfer import export_blocks, load_blocks

MAX_PROMPT_LOGITS = 1 << 24
"""Elements of logits that exist at once while prompt tokens are scored: 64 MiB in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a runner drives. All of one device and one number of slots. `graphs` replay what they can of the steps."""

    decoder: Decoder
    storage: KVStorage
    attention: AttentionBackend
    sampler: Sampler
    builder: InputBuilder
    graphs: DecodeGraphs | None = None


class Runner:
    """Runs steps one after the other. Keeps, besides its parts' own state, what a slot asked for its prompt."""

    def __init__(self, parts: Parts, max_num_seqs: int) -> None:
        self._parts = parts
        self._num_prompt_alternatives = [0] * max_num_seqs
        self._refused: dict[int, str] = {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[RowOutput, ...]:
        """One output per row, in order. A slot whose start was refused fails alone.

        Raises:
            ValueError: the batch asks for something this runner cannot do; nothing was computed.
            RuntimeError: torch failed (out of memory included).
        """
        for row in batch.rows:
            if row.num_drafts:
                raise ValueError(f"slot {row.slot} brings {row.num_drafts} drafts, and this engine verifies none")
        for start in batch.starts:
            self._start(start)
        self._parts.storage.copy_blocks(batch.copies)
        refused = {row.slot: self._refused[row.slot] for row in batch.rows if row.slot in self._refused}
        if not refused:
            return self._compute(batch)
        healthy = tuple(row for row in batch.rows if row.slot not in refused)
        computed = iter(self._compute(replace(batch, rows=healthy)) if healthy else ())
        return tuple(
            RowOutput(error=refused[row.slot]) if row.slot in refused else next(computed) for row in batch.rows
        )

    @torch.inference_mode()
    def move_blocks(self, batch: Batch) -> tuple[bytes, ...]:
        """Before `run`: read out the blocks that `batch` saves, then fill those that it loads.

        Raises:
            ValueError: a load is not of this pool's block size.
        """
        saved = export_blocks(self._parts.storage, batch.saves)
        load_blocks(self._parts.storage, [load.block_id for load in batch.loads], [load.data for load in batch.loads])
        return saved

    def record(self, progress: Progress) -> None:
        """Record the decode steps that are to be replayed. On the thread that will run steps; none must have begun.

        Raises:
            RuntimeError: torch failed (out of memory included).
        """
        if self._parts.graphs is not None:
            self._parts.graphs.record_all(progress)

    def close(self) -> None:
        """End the sampler's side thread."""
        self._parts.sampler.close()

    def _start(self, start: SlotStart) -> None:
        """Reset a slot. What the sampler refuses (a token id outside the vocabulary) fails that slot's rows."""
        self._num_prompt_alternatives[start.slot] = start.params.prompt_logprobs or 0
        self._refused.pop(start.slot, None)
        try:
            self._parts.sampler.start(start)
        except ValueError as error:
            self._refused[start.slot] = str(error)

    def _compute(self, batch: Batch) -> tuple[RowOutput, ...]:
        inputs = self._parts.builder.build(batch)
        sampling_slots = [batch.rows[row].slot for row in inputs.sample_rows.tolist()]
        self._parts.sampler.begin(sampling_slots)
        hidden = self._forward(inputs)
        scores = {part.row: self._score_prompt(hidden, batch.rows[part.row], part) for part in inputs.prompt_scores}
        sampled = self._sample(hidden, inputs, sampling_slots)
        return tuple(_outputs(len(batch.rows), sampled, scores))

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of all tokens, `[T, hidden]`; by a recorded step where there is one."""
        replayed = None if self._parts.graphs is None else self._parts.graphs.forward(inputs)
        if replayed is not None:
            return replayed
        attend = self._parts.attention.plan(inputs.attention)
        return self._parts.decoder.forward(inputs.token_ids, inputs.positions, attend)

    def _sample(self, hidden: Tensor, inputs: StepInputs, slots: Sequence[int]) -> dict[int, Sampled]:
        """By row of the batch. Only the hidden states of sampling rows meet the head."""
        if not slots:
            return {}
        logits = self._parts.decoder.logits(hidden[inputs.sample_hidden])
        sampled = self._parts.sampler.sample(slots, logits)
        return dict(zip(inputs.sample_rows.tolist(), sampled, strict=True))

    def _score_prompt(self, hidden: Tensor, row: Row, part: PromptScores) -> tuple[TokenLogprob, ...]:
        """Logprobs of a row's prompt targets, in pieces that bound the logits in memory."""
        num_at_once = max(1, MAX_PROMPT_LOGITS // self._parts.decoder.spec.vocab_size)
        entries: list[TokenLogprob] = []
        for low in range(0, len(part.targets), num_at_once):
            targets = torch.tensor(part.targets[low : low + num_at_once], device=hidden.device)
            logits = self._parts.decoder.logits(hidden[part.first + low : part.first + low + len(targets)])
            entries += prompt_logprobs(logits, targets, self._num_prompt_alternatives[row.slot])
        return tuple(entries)


def _outputs(
    num_rows: int, sampled: Mapping[int, Sampled], scores: Mapping[int, tuple[TokenLogprob, ...]]
) -> Iterable[RowOutput]:
    for row in range(num_rows):
        result, prompt = sampled.get(row), scores.get(row, ())
        if result is None:
            yield RowOutput(prompt_logprobs=prompt)
        elif result.error is not None:
            yield RowOutput(prompt_logprobs=prompt, error=result.error)
        else:
            logprobs = () if result.logprob is None else (result.logprob,)
            yield RowOutput((result.token_id,), logprobs, prompt, stopped=result.stopped)
