"""One step, from a `Batch` to its rows' outputs: the place where model, pool, attention and sampler meet.

Order, fixed: slots start, blocks are copied, inputs are laid out, grammar masks begin on their side thread, the model
runs, prompt tokens are scored, rows sample. Knows one thread and no requests; a step's errors are the engine's to name.

A step is launched, and finished when what it gives has come to the host. On a GPU the next may be launched before: all
its work goes behind the first one's, its tokens are taken from there on the device, and only rows that choose by what
their slot has chosen before (`Sampler.remembers`) make it wait, between its forward pass and its sampling:

    device    step N ............... | forward pass of N+1 ......... | sampling of N+1
    host        launch N+1: forward    | conclude N | launch N+1: sampling
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, IntArray
from engine.batch import Batch, Row, RowOutput, SlotStart
from engine.config import Progress
from engine.graphs import DecodeGraphs
from engine.inputs import InputBuilder, PromptScores, StepInputs
from engine.models.decoder import Decoder
from engine.sampling.logprobs import Described, describe_prompt
from engine.sampling.sampler import Drawn, Sampler
from engine.transit import Arrival, Courier, HostCourier, upload
from kvpool.storage import KVStorage
from kvpool.transfer import export_blocks, load_blocks

MAX_PROMPT_LOGITS = 1 << 24
"""Elements of logits that exist at once while prompt tokens are scored: 64 MiB in float32."""

_NOTHING = RowOutput()
"""Of a row that does not sample."""
_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a runner drives. All of one device and one number of slots. `graphs` replay what they can of the steps;
    `courier` brings to the host what they give."""

    decoder: Decoder
    storage: KVStorage
    attention: AttentionBackend
    sampler: Sampler
    builder: InputBuilder
    graphs: DecodeGraphs | None = None
    courier: Courier = field(default_factory=HostCourier)


class _Work(NamedTuple):
    """What the rows of a step come from, still on the device: prompt scores (in pieces) and draws, by row."""

    scores: Mapping[int, Sequence[Described]] = MappingProxyType({})
    sample_rows: IntArray = _NO_ROWS
    drawn: Drawn | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What must come to the host, wider element types first."""
        drawn = () if self.drawn is None else self.drawn.tensors
        return [*drawn, *(piece.numbers for pieces in self.scores.values() for piece in pieces)]


@dataclass(slots=True, eq=False)
class Launched:
    """A step given to the device: `rows` that compute, `refused` slots of `batch` with the reason, what is to come."""

    batch: Batch
    rows: Sequence[Row]
    refused: Mapping[int, str]
    work: _Work
    arrival: Arrival
    outputs: tuple[RowOutput, ...] | None = None


class Runner:
    """Runs steps one after the other. Keeps, besides its parts' own state, what a slot asked for its prompt."""

    def __init__(self, parts: Parts, max_num_seqs: int) -> None:
        self._parts = parts
        self._num_prompt_alternatives = [0] * max_num_seqs
        self._refused: dict[int, str] = {}
        self._open: deque[Launched] = deque()

    @property
    def is_late(self) -> bool:
        """Whether a launched step may still have to be waited for."""
        return self._parts.courier.is_late

    def run(self, batch: Batch) -> tuple[RowOutput, ...]:
        """Launch a step and finish it. Raises as both do."""
        return self.finish(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Give a step to the device, behind those that were given before.

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
        refused = self._refused_of(batch.rows) if self._refused else {}
        rows = tuple(row for row in batch.rows if row.slot not in refused) if refused else batch.rows
        work = _Work() if refused and not rows else self._compute(replace(batch, rows=rows) if refused else batch)
        launched = Launched(batch, rows, refused, work, self._parts.courier.send(work.tensors))
        self._open.append(launched)
        return launched

    def finish(self, launched: Launched) -> tuple[RowOutput, ...]:
        """Wait for a step, and for those before it: one output per row. A slot whose start was refused fails alone.

        Raises:
            RuntimeError: the device is lost.
        """
        while launched.outputs is None:
            self._conclude_oldest()
        return launched.outputs

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

    def _refused_of(self, rows: Sequence[Row]) -> dict[int, str]:
        return {row.slot: self._refused[row.slot] for row in rows if row.slot in self._refused}

    def _compute(self, batch: Batch) -> _Work:
        inputs = self._inputs_of(batch)
        slots = inputs.sample_slots
        if not self._open:
            self._parts.sampler.begin(slots)
        hidden = self._forward(inputs)
        scores = {part.row: self._score_prompt(hidden, batch.rows[part.row], part) for part in inputs.prompt_scores}
        return _Work(scores, inputs.sample_rows, self._draw(hidden, inputs, slots) if slots.size else None)

    def _inputs_of(self, batch: Batch) -> StepInputs:
        inputs = self._parts.builder.build(batch)
        if not inputs.has_pending:
            return inputs
        return replace(inputs, token_ids=self._parts.sampler.fill_in(inputs.token_ids))

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of all tokens, `[T, hidden]`; by a recorded step where there is one."""
        replayed = None if self._parts.graphs is None else self._parts.graphs.forward(inputs)
        if replayed is not None:
            return replayed
        attend = self._parts.attention.plan(inputs.attention)
        return self._parts.decoder.forward(inputs.token_ids, inputs.positions, attend)

    def _draw(self, hidden: Tensor, inputs: StepInputs, slots: IntArray) -> Drawn:
        """Only the hidden states of sampling rows meet the head."""
        logits = self._parts.decoder.logits(hidden if inputs.sample_hidden is None else hidden[inputs.sample_hidden])
        if self._open and self._parts.sampler.remembers(slots):
            while self._open:
                self._conclude_oldest()
        return self._parts.sampler.draw(slots, logits)

    def _score_prompt(self, hidden: Tensor, row: Row, part: PromptScores) -> list[Described]:
        """Logprobs of a row's prompt targets, in pieces that bound the logits in memory."""
        num_at_once = max(1, MAX_PROMPT_LOGITS // self._parts.decoder.spec.vocab_size)
        pieces = []
        for low in range(0, len(part.targets), num_at_once):
            targets = upload(torch.tensor(part.targets[low : low + num_at_once]), hidden.device)
            logits = self._parts.decoder.logits(hidden[part.first + low : part.first + low + len(targets)])
            pieces.append(describe_prompt(logits, targets, self._num_prompt_alternatives[row.slot]))
        return pieces

    def _conclude_oldest(self) -> None:
        """Turn what the oldest open step gave into its outputs, on the host."""
        launched = self._open[0]
        arrived = iter(launched.arrival.wait())  # if the device is lost, so it is for those behind
        self._open.popleft()
        launched.outputs = tuple(self._outputs_of(launched, arrived))

    def _outputs_of(self, launched: Launched, arrived: Iterator[Tensor]) -> list[RowOutput]:
        """One output a row of the batch: what was sampled, what was scored of its prompt, or why it was refused."""
        work, num_rows, sampled = launched.work, len(launched.rows), list[RowOutput]()
        if work.drawn is not None:
            tensors = [next(arrived) for _ in work.drawn.tensors]
            sampled = self._parts.sampler.conclude(work.drawn, tensors)
        outputs = sampled if len(sampled) == num_rows else _spread(sampled, work.sample_rows, num_rows)
        for row, pieces in work.scores.items():
            scores = tuple(entry for piece in pieces for entry in piece.read(next(arrived)))
            outputs[row] = outputs[row]._replace(prompt_logprobs=scores)
        if not launched.refused:
            return outputs
        computed = iter(outputs)
        reasons = (launched.refused.get(row.slot) for row in launched.batch.rows)
        return [next(computed) if reason is None else RowOutput(error=reason) for reason in reasons]


def _spread(sampled: Sequence[RowOutput], rows: IntArray, num_rows: int) -> list[RowOutput]:
    """The outputs of all rows of a step in which only `rows` sampled."""
    outputs = [_NOTHING] * num_rows
    for row, output in zip(rows.tolist(), sampled, strict=True):
        outputs[row] = output
    return outputs
