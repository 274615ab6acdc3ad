"""What is asked: prompts cut from prose and output lengths, in the mixes that a server meets.

Every prompt begins with a few random tokens of its own, so that no cache can answer it but where a mix shares a
beginning on purpose. The same seed gives the same questions, so that servers in turn get equal ones.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).resolve().parent / "data" / "a_scandal_in_bohemia.txt"
NUM_OWN = 4
"""Random tokens at a prompt's beginning."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids, and how many tokens to answer."""

    prompt_ids: tuple[int, ...]
    num_out: int


@dataclass(frozen=True, slots=True)
class Prose:
    """Token ids of a long text, to cut prompts from."""

    token_ids: tuple[int, ...]

    def passage(self, num_tokens: int, rng: random.Random) -> tuple[int, ...]:
        """`num_tokens` ids: some of the text's tokens at random, then a passage. The text repeats where too short."""
        own = tuple(rng.choice(self.token_ids) for _ in range(min(NUM_OWN, num_tokens)))
        rest = num_tokens - len(own)
        start = rng.randrange(len(self.token_ids))
        long_enough = self.token_ids * (1 + (start + rest) // len(self.token_ids))
        return own + tuple(long_enough[start : start + rest])


@dataclass(frozen=True, slots=True)
class Mix:
    """A way to ask.

    Attributes:
        max_tokens: the most that one question needs, prompt and output together.
        lengths: (in, out) where all questions are alike and share nothing, so that bounds can be told; else None.
    """

    name: str
    about: str
    max_tokens: int
    draw: Callable[[Prose, int, random.Random], list[Question]]
    lengths: tuple[int, int] | None = None

    def questions(self, prose: Prose, num: int, seed: str) -> list[Question]:
        """`num` questions, the same for the same seed."""
        return self.draw(prose, num, random.Random(f"{self.name}/{seed}"))


def fixed(num_in: int, num_out: int) -> Mix:
    """Every question alike."""

    def draw(prose: Prose, num: int, rng: random.Random) -> list[Question]:
        return [Question(prose.passage(num_in, rng), num_out) for _ in range(num)]

    return Mix(f"{num_in}/{num_out}", f"{num_in} tokens in, {num_out} out", num_in + num_out, draw, (num_in, num_out))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths with this mean and this deviation of their logarithm, within 4..`most`."""

    mean: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(4, min(self.most, round(rng.lognormvariate(mu, self.sigma))))


CHAT_IN = LogNormal(mean=161.0, sigma=1.2, most=1024)
CHAT_OUT = LogNormal(mean=338.0, sigma=0.9, most=768)
"""Means of the ShareGPT conversations in Kwon et al. 2023 (PagedAttention), figure 11; the spread is our choice."""


def conversations() -> Mix:
    """Lengths as people's conversations have them: most short, some very long."""

    def draw(prose: Prose, num: int, rng: random.Random) -> list[Question]:
        return [Question(prose.passage(CHAT_IN.draw(rng), rng), CHAT_OUT.draw(rng)) for _ in range(num)]

    about = f"lognormal, means {CHAT_IN.mean:.0f} in and {CHAT_OUT.mean:.0f} out, as in ShareGPT"
    return Mix("sharegpt", about, CHAT_IN.most + CHAT_OUT.most, draw)


def shared_prefix(num_shared: int = 512, num_own: int = 64, num_out: int = 64) -> Mix:
    """One long beginning for all, as of a system prompt; a fresh one for every set of questions."""

    def draw(prose: Prose, num: int, rng: random.Random) -> list[Question]:
        shared = prose.passage(num_shared, rng)
        return [Question(shared + prose.passage(num_own, rng), num_out) for _ in range(num)]

    about = f"{num_shared} shared and {num_own} own tokens in, {num_out} out"
    return Mix("prefix", about, num_shared + num_own + num_out, draw)


def mix_named(name: str) -> Mix:
    """`128/64`-like lengths, `sharegpt` or `prefix`. Raises ValueError for anything else."""
    named = {"sharegpt": conversations, "prefix": shared_prefix}
    if name in named:
        return named[name]()
    num_in, slash, num_out = name.partition("/")
    if slash and num_in.isdigit() and num_out.isdigit() and int(num_in) > 0 and int(num_out) > 0:
        return fixed(int(num_in), int(num_out))
    raise ValueError(f"{name!r} is no mix: give IN/OUT tokens, {' or '.join(named)}")
