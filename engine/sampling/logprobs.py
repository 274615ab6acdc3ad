"""Log-probabilities to report: of the model's raw distribution, before any sampling step edited it.

Knows logits and token ids. Values are natural logs in float32, finite: the floor stands for everything below it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import TokenLogprob
from engine.sampling import truncation
from engine.sampling.race import row_chunks
from engine.transit import upload

LOGPROB_FLOOR = -9999.0

_CHUNK_ROWS = 64
"""Prompt rows worked on at a time, so that temporary tensors stay at 64 vocabularies (39 MB at 150,000 tokens)."""


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """Log-probabilities of rows: `numbers` [n, columns] float32 on the device, and what they will mean on the host.

    A row of them: chosen, top and padded extra values, then rank, chosen id, top ids. Ids and ranks are exact in
    float32 up to 2**24, far beyond any vocabulary, so that all goes to the host in one piece.
    """

    numbers: Tensor
    num_top: Sequence[int]
    extra_ids: Sequence[Sequence[int]]

    def read(self, numbers: Tensor) -> list[TokenLogprob]:
        """One entry a row, from `numbers` as they have come to the host."""
        num_fixed = 3 + max(map(len, self.extra_ids), default=0)
        width = (numbers.shape[-1] - num_fixed) // 2
        rows = zip(numbers.tolist(), self.num_top, self.extra_ids, strict=True)
        return [_unpack(row, width, min(top, width), extra) for row, top, extra in rows]


def describe(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int], extra_ids: Sequence[Sequence[int]]
) -> Described:
    """Each row's chosen token, its `num_top` most likely alternatives, then its `extra_ids`. Waits for no device.

    Args:
        logits: [n, vocab] raw.
        token_ids: [n] int64, on the same device.
        num_top: [n] how many alternatives each row wants.
        extra_ids: [n] further tokens each row wants.
    """
    wanted = _padded(extra_ids, logits.device)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    normaliser, rank = _normaliser_and_rank(logits, chosen)
    top_logits, top_ids = _most_likely(logits, min(max(num_top, default=0), logits.shape[-1]))
    values = torch.cat((chosen, top_logits, logits.gather(-1, wanted)), dim=-1) - normaliser
    numbers = torch.cat((values.clamp(min=LOGPROB_FLOOR), rank, token_ids.unsqueeze(-1), top_ids), dim=-1)
    return Described(numbers, num_top, extra_ids)


def describe_prompt(logits: Tensor, targets: Tensor, num_top: int) -> Described:
    """The same for a prompt: raw `logits` [n, vocab] and the tokens that followed, `targets` [n], n > 0."""
    parts = []
    for first in range(0, logits.shape[0], _CHUNK_ROWS):
        rows = logits[first : first + _CHUNK_ROWS].float()
        count = rows.shape[0]
        parts.append(describe(rows, targets[first : first + count], [num_top] * count, [()] * count).numbers)
    count = logits.shape[0]
    return Described(torch.cat(parts), [num_top] * count, [()] * count)


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprob]:
    """`describe_prompt`, read at once; of no rows, nothing."""
    if not logits.shape[0]:
        return []
    described = describe_prompt(logits, targets, num_top)
    return described.read(described.numbers)


def _normaliser_and_rank(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of `logits` [n, vocab]: the log of the summed exponentials, and the place of logit `chosen` [n, 1].

    Both [n, 1] float32; places count from 1, and equals share the first of theirs.
    """
    normaliser, rank = torch.empty_like(chosen), torch.empty_like(chosen)
    for rows in row_chunks(logits):
        normaliser[rows] = torch.logsumexp(logits[rows], dim=-1, keepdim=True)
        above = logits[rows].clone().gt_(chosen[rows])  # ones and zeros, far cheaper to add up than booleans
        rank[rows] = above.sum(-1, keepdim=True) + 1.0
    return normaliser, rank


def _most_likely(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Logits and ids, both [n, width], most likely first, lower id first among equals."""
    if width == 0:
        return logits[:, :0], torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    values, ids = truncation.narrow(logits, width)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _padded(id_lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Id lists as [n, longest], padded with token 0."""
    longest = max(map(len, id_lists), default=0)
    rows = [[*ids, *[0] * (longest - len(ids))] for ids in id_lists]
    return upload(torch.tensor(rows, dtype=torch.int64), device).reshape(len(id_lists), longest)


def _unpack(row: list[float], width: int, num_top: int, extra_ids: Sequence[int]) -> TokenLogprob:
    """One row of `Described.numbers`, with `width` top columns, of which it wants `num_top`."""
    ids_at = len(row) - width
    top_ids = (int(token_id) for token_id in row[ids_at : ids_at + num_top])
    return TokenLogprob(
        token_id=int(row[ids_at - 1]),
        logprob=row[0],
        rank=int(row[ids_at - 2]),
        top_ids=(*top_ids, *extra_ids),
        top_logprobs=(*row[1 : 1 + num_top], *row[1 + width : 1 + width + len(extra_ids)]),
    )
