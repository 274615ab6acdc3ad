"""What rounding costs in quality, of the KV cache or of the weights: perplexity and greedy agreement on fixed prose.

    perplexity       of windows of text that the model has not seen in this order; each token given all before it
    same top token   share of those positions where the likeliest next token is the one of full precision
    same answer      greedy continuations of passages: share of tokens before the first that differs

Everything goes through the whole engine, as a server would run it. Prints one Markdown table.

    python -m bench.quality                                   KV caches
    python -m bench.quality --weights none,auto,int8,int4     weights, beside the first
"""

import argparse
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.llm import LLM

TEXT = Path(__file__).resolve().parent / "data" / "a_scandal_in_bohemia.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant's figures: natural-log probabilities, likeliest tokens, greedy continuations, bytes held."""

    logprobs: Sequence[float]
    top_ids: Sequence[int]
    answers: Sequence[Sequence[int]]
    kv_bytes_per_token: int
    weight_bytes: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logprob."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def main() -> None:
    """Measure and print."""
    args = parse_args()
    setting, names = ("kv_cache_dtype", args.caches) if args.weights is None else ("quantization", args.weights)
    outcomes = {name: measure(args, {setting: name}) for name in names}
    print(report(args, outcomes))
    if args.json:
        full = outcomes[names[0]]
        summary = {name: row(outcome, full) for name, outcome in outcomes.items()}
        Path(args.json).write_text(json.dumps(summary, indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--caches", type=_names, default=("auto", "int8", "fp8"), help="KV caches, the full one first")
    parser.add_argument("--weights", type=_names, default=None, help="quantizations instead, the exact one first")
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, for perplexity")
    parser.add_argument("--window", type=int, default=1024, help="tokens of one window")
    parser.add_argument("--answers", type=int, default=16, help="passages that are continued")
    parser.add_argument("--num-in", type=int, default=256, help="tokens of a passage")
    parser.add_argument("--num-out", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--json", default=None, help="file for the figures")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def measure(args: argparse.Namespace, settings: Mapping[str, Any]) -> Outcome:
    """Score the windows and continue the passages with one variant."""
    text = TEXT.read_text()
    with LLM(
        args.model,
        progress=False,
        dtype=args.dtype,
        max_model_len=max(args.window, args.num_in + args.num_out) + 1,
        enable_prefix_caching=False,
        **settings,
    ) as llm:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        windows = [ids[start : start + args.window] for start in range(0, args.tokens, args.window)]
        stride = max(1, (len(ids) - args.num_in) // args.answers)
        passages = [ids[i * stride : i * stride + args.num_in] for i in range(args.answers)]
        scores = [score(llm, window) for window in windows]
        answers = llm.generate(passages, max_tokens=args.num_out, temperature=0, ignore_eos=True, return_token_ids=True)
        return Outcome(
            logprobs=[value for logprobs, _ in scores for value in logprobs],
            top_ids=[token_id for _, tops in scores for token_id in tops],
            answers=[answer.body["choices"][0]["token_ids"] for answer in answers],
            kv_bytes_per_token=llm.info.layout.bytes_per_token,
            weight_bytes=llm.info.weight_bytes,
        )


def score(llm: LLM, window: Sequence[int]) -> tuple[list[float], list[int]]:
    """Logprob of each token after the first, and the likeliest token there."""
    [answer] = llm.generate([list(window)], max_tokens=1, temperature=0, prompt_logprobs=1)
    entries: Sequence[Mapping[str, Any]] = answer.body["choices"][0]["prompt_logprobs"][1:]
    logprobs = [entry[str(token_id)]["logprob"] for entry, token_id in zip(entries, window[1:], strict=True)]
    tops = [int(next(key for key, value in entry.items() if value["rank"] == 1)) for entry in entries]
    return logprobs, tops


def row(outcome: Outcome, full: Outcome) -> dict[str, float]:
    """One variant's figures beside full precision's."""
    num_same = [shared_length(mine, theirs) for mine, theirs in zip(outcome.answers, full.answers, strict=True)]
    return {
        "kv_bytes_per_token": outcome.kv_bytes_per_token,
        "capacity": full.kv_bytes_per_token / outcome.kv_bytes_per_token,
        "weight_bytes": outcome.weight_bytes,
        "perplexity": outcome.perplexity,
        "perplexity_change": outcome.perplexity / full.perplexity - 1,
        "same_top": sum(map(int.__eq__, outcome.top_ids, full.top_ids)) / len(full.top_ids),
        "same_answer": sum(num_same) / sum(map(len, full.answers)),
    }


def shared_length(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))


def report(args: argparse.Namespace, outcomes: Mapping[str, Outcome]) -> str:
    """The table, first of all full precision, and what it was measured on."""
    full = next(iter(outcomes.values()))
    what = "KV cache | bytes per token | tokens in that memory" if args.weights is None else "weights | MB"
    num_figures = what.count("|") + 4
    lines = [
        f"{args.model or 'SmolLM2-135M-Instruct'}, {args.dtype}, {platform.machine()}; {len(full.logprobs)} scored "
        f"tokens in windows of {args.window}; {args.answers} passages of {args.num_in} tokens, {args.num_out} added.",
        "",
        f"| {what} | perplexity | change | same top token | same answer |",
        "| --- |" + " ---: |" * num_figures,
    ]
    for name, outcome in outcomes.items():
        cells = row(outcome, full)
        if args.weights is None:
            held = f"{cells['kv_bytes_per_token']:,} | {cells['capacity']:.2f} x"
        else:
            held = f"{cells['weight_bytes'] / 1e6:.0f}"
        lines.append(
            f"| {name} | {held} | {cells['perplexity']:.4f} | {cells['perplexity_change']:+.3%} | "
            f"{cells['same_top']:.2%} | {cells['same_answer']:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
