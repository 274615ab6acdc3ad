"""`python -m bench`: measure Quire, and other servers in turn with it, on models kept on this machine.

    python -m bench                                             both models, the short presets
    python -m bench --model smollm2 --peer llama=http://127.0.0.1:9000
    python -m bench --serve "bf16=--dtype bfloat16" --serve "fp32=--dtype float32" --users 1,32
    python -m bench --peer-command "llama=python -m bench.peers.llama_cpp {model}"

Writes report.md, figures.json and charts into a fresh folder below bench/results/, and prints the report.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.figures import Slo
from bench.gate import GateFailed
from bench.machine import busy_warning, commit, load_average, num_cores, processor, software
from bench.models import EMBEDDED, SHAPE
from bench.plan import PRESETS, Plan
from bench.plots import charts_of, draw
from bench.processes import ServerFailed
from bench.report import Session, as_json, document
from bench.session import Cast, measure
from bench.workloads import mix_named
from engine.errors import LoadError

RESULTS = Path(__file__).resolve().parent / "results"
PRESET_OF_LATER_MODELS = "brief"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep. Exit status 1 when a server or the gate failed; nothing is printed as a figure then."""
    args = parse_args(argv)
    load = load_average()
    folder = args.out or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{commit()}"
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    sessions: list[Session] = []
    try:
        for number, model in enumerate(args.model):
            preset = args.preset if number == 0 or args.preset == "full" else PRESET_OF_LATER_MODELS
            plan = plan_of(args, PRESETS[preset])
            sessions.append(measure(model, plan, cast_of(args), args.slo, with_gate=args.gate, logs=folder))
    except (ServerFailed, GateFailed, LoadError, ValueError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    facts = facts_of(load, time.monotonic() - began_s, args)
    warning = busy_warning(load)
    keep(folder, facts, [warning] if warning else [], sessions)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked. Exits with one line when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    who = parser.add_argument_group("who is measured")
    who.add_argument("--model", action="append", help=f"{EMBEDDED}, {SHAPE} (see bench.models), or a path; repeatable")
    who.add_argument("--serve", action="append", metavar="NAME=FLAGS", help="a Quire server with these flags")
    who.add_argument("--no-serve", action="store_true", help="start no Quire server: peers only")
    who.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="a running server")
    who.add_argument("--peer-command", action="append", default=[], metavar="NAME=COMMAND", help="prints its address")
    who.add_argument("--offline", action=argparse.BooleanOptionalAction, default=None, help="the model without HTTP")
    who.add_argument("--route", choices=("completions", "chat"), default="completions")
    who.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"))
    what = parser.add_argument_group("what is asked (each takes the place of the preset's)")
    preset_help = f"{PRESET_OF_LATER_MODELS} for models after the first, where not full (short)"
    what.add_argument("--preset", choices=sorted(PRESETS), default="short", help=preset_help)
    what.add_argument("--users", type=_numbers(int), metavar="1,8,32")
    what.add_argument("--mix", action="append", help="IN/OUT tokens, sharegpt or prefix; repeatable")
    what.add_argument("--rates", type=_numbers(float), metavar="R,...", help="open loop, requests per second")
    what.add_argument("--repeats", type=int, help="runs of every load on every target; 1 is quickest")
    what.add_argument("--rounds", type=int, help="requests per user")
    what.add_argument("--slo", type=_slo, default=Slo(), metavar="TTFT,TPOT", help="seconds (1,0.1)")
    parser.add_argument("--gate", action=argparse.BooleanOptionalAction, default=True, help="compare tokens first")
    parser.add_argument("--out", type=Path, help="folder for report, figures, charts and logs")
    args = parser.parse_args(argv)
    _settle(args, parser)
    return args


def _settle(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill what follows from other arguments, and refuse what contradicts itself."""
    has_peers = bool(args.peer or args.peer_command)
    args.model = args.model or ([EMBEDDED] if has_peers or args.serve else [EMBEDDED, SHAPE])
    if args.peer and len(args.model) > 1:
        parser.error("a peer serves one model: give one --model")
    if args.no_serve and (args.serve or not has_peers):
        parser.error("--no-serve leaves nothing to measure" if not has_peers else "--no-serve contradicts --serve")
    args.offline = args.offline if args.offline is not None else not (has_peers or args.serve)
    try:
        args.serve = {} if args.no_serve else _pairs(args.serve or ["quire="])
        args.peer, args.peer_command = _pairs(args.peer), _pairs(args.peer_command)
        for mix in args.mix or ():
            mix_named(mix)
    except ValueError as error:
        parser.error(str(error))
    if len({*args.serve, *args.peer, *args.peer_command}) < len(args.serve) + len(args.peer) + len(args.peer_command):
        parser.error("two targets have the same name")


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or "/" in name:
            raise ValueError(f"{text!r}: expected NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _numbers(kind: type) -> "type":
    def parse(text: str) -> tuple[float, ...]:
        numbers = tuple(kind(part) for part in text.split(","))
        if any(number <= 0 for number in numbers):
            raise argparse.ArgumentTypeError("numbers above 0 are needed")
        return numbers

    return parse  # type: ignore[return-value]  # argparse calls it


def _slo(text: str) -> Slo:
    ttft, _, tpot = text.partition(",")
    return Slo(float(ttft), float(tpot))


def plan_of(args: argparse.Namespace, preset: Plan) -> Plan:
    """The preset, with what the command line says in its place."""
    plan = preset
    if args.users or args.mix or args.rates:
        plan = replace(plan, extras=(), shares=(), rates=args.rates or ())
    return replace(
        plan,
        users=args.users or plan.users,
        mixes=tuple(args.mix or plan.mixes),
        repeats=args.repeats or plan.repeats,
        extra_repeats=args.repeats or plan.extra_repeats,
        rounds=args.rounds,
    )


def cast_of(args: argparse.Namespace) -> Cast:
    """Who the command line names."""
    return Cast(args.serve, args.peer, args.peer_command, args.offline, args.route, args.api_key)


def facts_of(load: float, took_s: float, args: argparse.Namespace) -> dict[str, str]:
    """What a reader needs beside the figures."""
    return {
        "machine": processor(),
        "software": software(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench", *_without_key(sys.argv[1:])]),
        "threads": f"{num_cores()} for every server that says nothing else; the load generator runs beside it",
        "route": f"/v1/{'chat/' if args.route == 'chat' else ''}completions, streamed",
        "load average before": f"{load:.2f}",
        "took": f"{took_s:.0f} s",
    }


def _without_key(arguments: Sequence[str]) -> list[str]:
    hidden = [
        "..." if before == "--api-key" else argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
    ]
    return ["--api-key=..." if argument.startswith("--api-key=") else argument for argument in hidden]


def keep(folder: Path, facts: dict[str, str], warnings: Sequence[str], sessions: Sequence[Session]) -> None:
    """Write and print everything."""
    report = document(facts, warnings, sessions)
    pictures, text = draw([chart for session in sessions for chart in charts_of(session)], folder)
    if pictures:
        report += "\n" + "\n".join(f"![{path.stem}]({path.name})" for path in pictures) + "\n"
    elif text:
        report += f"\n```\n{text}\n```\n"
    (folder / "report.md").write_text(report)
    (folder / "figures.json").write_text(json.dumps(as_json(facts, sessions), indent=1) + "\n")
    print(report)
    sys.stderr.write(f"kept in {folder}\n")


if __name__ == "__main__":
    sys.exit(main())
