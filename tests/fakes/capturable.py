"""Stand-ins for what only a GPU has: attention whose step can be recorded, and a recorder of steps."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, AttentionShape, DecodeTensors, LayerAttention
from engine.attention.torch_paged import TorchPagedAttention
from kvpool.storage import KVStorage


class CapturableTorchAttention(TorchPagedAttention):
    """The torch backend, reading a decode step's lengths only when the step runs, as a kernel would."""

    name = "capturable torch"

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        super().__init__(storage, shape)
        self.planned: list[int] = []

    def plan_decode(self, tensors: DecodeTensors) -> LayerAttention:
        self.planned.append(len(tensors.context_lens))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            live = tensors.context_lens > 0
            out = torch.zeros(q.shape, dtype=q.dtype)
            assert torch.equal(live, tensors.slot_mapping >= 0)
            if live.any():
                attend_live = self.plan(_live_inputs(tensors, live))
                out[live] = attend_live(layer, q[live], k[live], v[live])
            return out

        return attend


def _live_inputs(tensors: DecodeTensors, live: Tensor) -> AttentionInputs:
    num_rows = int(live.sum())
    return AttentionInputs(
        query_starts=np.arange(num_rows + 1),
        context_lens=tensors.context_lens[live].long().numpy(),
        num_decode_rows=num_rows,
        block_tables=tensors.block_tables[live].long(),
        slot_mapping=tensors.slot_mapping[live],
    )


class FakeRecorder:
    """Runs what it is given again instead of replaying it; `replayed` are indices in order of recording."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        index = self.num_recorded
        self.num_recorded += 1

        def replay() -> None:
            self.replayed.append(index)
            run()

        return replay
