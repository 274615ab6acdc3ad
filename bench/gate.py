"""The gate before any timing: a server's greedy answers are the reference's, or differ only where rounding may decide.

A float32 server must give the reference's tokens; where it does not, the reference's own logits of the two tokens must
be as good as equal. Other arithmetic (bfloat16, quantized activations) may flip closer calls, so there the gap between
the two logits, measured in deviations of all logits, has a wider bound. After the first difference the answers are
about different texts, and nothing more is compared.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.targets import Target

EXACT_GAP = 0.002
ROUNDED_GAP = 0.3
"""Of the logits' deviation: what float32 and what coarser arithmetic may make of two logits."""


class GateFailed(Exception):
    """A server's answer is not the model's: nothing may be timed."""


@dataclass(frozen=True, slots=True)
class Step:
    """The reference at one token: the likeliest ids (the first is its choice), their logits, all logits' deviation."""

    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]
    deviation: float

    def gap(self, is_candidate: Callable[[int], bool]) -> float:
        """How far below the choice the best of these candidates is, in deviations; at least so, beyond the top ones."""
        for token_id, logit in zip(self.top_ids, self.top_logits, strict=True):
            if is_candidate(token_id):
                return (self.top_logits[0] - logit) / self.deviation
        return (self.top_logits[0] - self.top_logits[-1]) / self.deviation


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens equal before the first difference, of how many; and the reference's gap there (0 without one)."""

    num_equal: int
    num_tokens: int
    gap: float

    def __str__(self) -> str:
        return f"{self.num_equal}/{self.num_tokens}" + (f" (then a gap of {self.gap:.3f})" if self.gap else "")


def compare_ids(token_ids: Sequence[int], steps: Sequence[Step]) -> Verdict:
    """Judge an answer given as token ids."""
    for number, (token_id, step) in enumerate(zip(token_ids, steps, strict=False)):
        if token_id != step.top_ids[0]:
            return Verdict(number, len(steps), step.gap(partial(eq, token_id)))
    if len(token_ids) < len(steps):
        return Verdict(len(token_ids), len(steps), float("inf"))
    return Verdict(len(steps), len(steps), 0.0)


def compare_text(text: str, steps: Sequence[Step], decode: Callable[[Sequence[int]], str]) -> Verdict:
    """Judge an answer given as text: the longest beginning that the reference's tokens spell, and what follows it."""
    chosen = [step.top_ids[0] for step in steps]
    num_equal = 0
    while num_equal < len(steps) and _spells(decode(chosen[: num_equal + 1]), text):
        num_equal += 1
    if num_equal == len(steps):
        return Verdict(num_equal, len(steps), 0.0)
    equal = chosen[:num_equal]
    gap = steps[num_equal].gap(lambda other: other != chosen[num_equal] and _spells(decode([*equal, other]), text))
    return Verdict(num_equal, len(steps), gap)


def _spells(beginning: str, text: str) -> bool:
    """Half a character at the end shows as U+FFFD and may become anything."""
    return text.startswith(beginning.rstrip("\ufffd"))


def reference_steps(model: Path, prompts: Sequence[Sequence[int]], num_out: int) -> list[list[Step]]:
    """transformers' greedy answers, computed in a process of its own. Raises GateFailed when it cannot."""
    command = [sys.executable, "-m", "bench.reference", str(model), "--num", str(num_out)]
    asked = json.dumps([list(prompt) for prompt in prompts])
    done = subprocess.run(command, cwd=ROOT, input=asked, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise GateFailed(f"transformers gave no reference, its process ended with {done.returncode}: {last}")
    return [_steps(json.loads(line)) for line in done.stdout.splitlines()]


def _steps(entries: Sequence[dict[str, Any]]) -> list[Step]:
    return [Step(tuple(entry["top_ids"]), tuple(entry["top_logits"]), entry["deviation"]) for entry in entries]


def check(
    target: Target,
    prompts: Sequence[Sequence[int]],
    references: Sequence[Sequence[Step]],
    decode: Callable[[Sequence[int]], str],
) -> list[Verdict]:
    """Ask a target every prompt. Raises GateFailed when an answer differs by more than rounding."""
    verdicts = []
    for prompt, steps in zip(prompts, references, strict=True):
        token_ids, text = target.greedy(prompt, len(steps))
        verdict = compare_text(text, steps, decode) if token_ids is None else compare_ids(token_ids, steps)
        verdicts.append(verdict)
    allowed = EXACT_GAP if is_exact(target) else ROUNDED_GAP
    if any(verdict.gap > allowed for verdict in verdicts):
        told = ", ".join(map(str, verdicts))
        raise GateFailed(f"{target.name}: greedy tokens differ from transformers': {told}; allowed gap {allowed}")
    return verdicts


def is_exact(target: Target) -> bool:
    """Whether a target computes in float32 throughout, as far as it tells."""
    return target.served.dtype == "float32" and "quantiz" not in target.served.how
