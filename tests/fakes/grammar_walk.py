"""A model that writes whatever its grammar allows: random tokens of SmolLM2 under the masks of a constraint."""

import asyncio
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from engine.sampling.constraint import Constraint
from server.text.structured import GrammarSpec, StructuredCompiler
from tests.fakes.smollm2 import smollm2_tokenizer

STOP_IDS = frozenset({0, 2})
VOCAB_SIZE = smollm2_tokenizer().vocab_size
ENDINGS = ('"', "}", "]", "<", ")")


@dataclass(frozen=True)
class Walk:
    text: str
    ended: bool


@cache
def compiler() -> StructuredCompiler:
    return StructuredCompiler(smollm2_tokenizer(), VOCAB_SIZE, STOP_IDS)


def compiled(spec: GrammarSpec) -> Constraint:
    return asyncio.run(compiler().compile(spec))


def allowed_ids(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def walk(constraint: Constraint, seed: int, max_tokens: int = 400) -> Walk:
    """Text made of allowed tokens only; after some tokens it hurries to an end."""
    tokenizer = smollm2_tokenizer()
    rng = random.Random(seed)
    state = constraint.start()
    data = b""
    for step in range(max_tokens):
        mask = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
        state.fill_mask(mask)
        ids = allowed_ids(mask)
        assert ids.size, f"no token is allowed after {data!r}"
        token_id = _choose(ids, rng, hurry=step > 30)
        assert state.accept([token_id])
        if token_id in STOP_IDS:
            return Walk(data.decode(), True)
        data += tokenizer.token_bytes(token_id)
    return Walk(data.decode(errors="replace"), False)


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the grammar allows exactly this text, token by token, and may end there."""
    state = constraint.start()
    tokens = smollm2_tokenizer().encode(text, add_special_tokens=False)
    return state.accept(tokens) and state.accept([2])


def allows_start(constraint: Constraint, text: str) -> bool:
    """Whether the grammar allows the text as a beginning."""
    return constraint.start().accept(smollm2_tokenizer().encode(text, add_special_tokens=False))


def _choose(ids: npt.NDArray[np.int64], rng: random.Random, *, hurry: bool) -> int:
    stops = sorted(STOP_IDS.intersection(ids.tolist()))
    if stops and (hurry or rng.random() < 0.3):
        return rng.choice(stops)
    others = ids[~np.isin(ids, list(STOP_IDS))]
    if hurry or rng.random() < 0.2:
        tokenizer = smollm2_tokenizer()
        closing = [i for i in map(tokenizer.token_id, ENDINGS) if i is not None and i in others]
        if closing:
            return closing[0]
    return int(rng.choice(others)) if others.size else rng.choice(stops)
