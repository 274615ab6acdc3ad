"""One model's measurement from start to end: servers up, gate, warm-up, cells in turn, bounds before and after."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from bench import gate
from bench.arrivals import Closed, Poisson
from bench.bounds import ModelCost, mean_of, measure_bounds
from bench.figures import Figures, Run, Slo, figures_of
from bench.models import model_path
from bench.plan import Cell, Plan, distinct_seed
from bench.processes import ServerFailed, from_command, quire
from bench.report import Outcome, Session
from bench.targets import HttpTarget, OfflineTarget, Route, Served, Target, offline
from bench.workloads import TEXT, Prose, fixed
from engine.models.families import spec_from_gguf, spec_from_hf_config
from engine.models.spec import DecoderSpec
from engine.weights.gguf_header import read_gguf_header
from server.text.tokenizer import Tokenizer

GATE_PROMPTS, GATE_IN, GATE_OUT = 3, 48, 16
FLOAT16_BYTES = 2
BAR = "{desc}: {percentage:3.0f}% |{bar:30}| {elapsed}, about {remaining} to go{postfix}"


@dataclass(frozen=True, slots=True)
class Cast:
    """Who is measured: by name, our own servers' flags, peers' addresses, and commands that start peers."""

    ours: Mapping[str, str]
    peers: Mapping[str, str]
    commands: Mapping[str, str]
    has_offline: bool
    route: Route
    api_key: str | None


@dataclass(frozen=True, slots=True)
class Local:
    """The model's own files, as the harness reads them."""

    path: Path
    spec: DecoderSpec
    tokenizer: Tokenizer
    prose: Prose

    @classmethod
    def of(cls, name: str) -> "Local":
        """Find or make the model called `name`, and read its sizes and tokenizer."""
        path = model_path(name)
        if path.is_dir():
            spec = spec_from_hf_config(json.loads((path / "config.json").read_text()))
            tokenizer = Tokenizer.from_pretrained(str(path))
        else:
            header = read_gguf_header(path)
            spec, tokenizer = spec_from_gguf(header), Tokenizer.from_gguf(header.metadata)
        return cls(path, spec, tokenizer, Prose(tuple(tokenizer.encode(TEXT.read_text(), add_special_tokens=False))))

    def decode(self, token_ids: Sequence[int]) -> str:
        """As a server would write them."""
        return self.tokenizer.decode(token_ids)

    def cost(self, served: Served) -> ModelCost | None:
        """None where the server does not tell its size; keys and values count as float16 where it does not tell."""
        if not served.weight_bytes:
            return None
        spec = self.spec
        attention = spec.hidden_size * 2 * (spec.query_size + spec.kv_size)
        mlp = 3 * spec.hidden_size * spec.intermediate_size
        kv_bytes = 2 * spec.num_layers * spec.kv_size * FLOAT16_BYTES
        return ModelCost(
            weight_bytes=served.weight_bytes,
            kv_bytes_per_token=served.kv_bytes_per_token or kv_bytes,
            num_layer_params=spec.num_layers * (attention + mlp),
            num_head_params=spec.vocab_size * spec.hidden_size,
            dtype=served.dtype,
        )


def measure(name: str, plan: Plan, cast: Cast, slo: Slo, *, with_gate: bool, logs: Path) -> Session:
    """Measure one model.

    Raises:
        ServerFailed: a server does not come up, or fails every request of a cell.
        GateFailed: an answer is not the model's.
    """
    local = Local.of(name)
    _say(f"{name}: measuring the machine's bounds")
    bounds = measure_bounds()
    with contextlib.ExitStack() as stack:
        session = Session(name, slo, bounds, {})
        targets = list(_start(local, cast, stack, session, logs))
        session.served = {target.name: target.served for target in targets}
        session.costs = {one.name: cost for one in targets if (cost := local.cost(one.served)) is not None}
        if with_gate:
            _gate(local, targets, session)
        _run_cells(plan, targets, local.prose, session)
    session.bounds = mean_of(bounds, measure_bounds())
    return session


def _start(local: Local, cast: Cast, stack: contextlib.ExitStack, session: Session, logs: Path) -> Iterator[Target]:
    """Our servers, then peers, then the offline process."""
    model = str(local.path)
    probe = fixed(32, 8).questions(local.prose, 1, "probe")[0]

    def http(name: str, url: str, how: str) -> HttpTarget:
        target = HttpTarget(name, url, local.decode, cast.route, cast.api_key, how)
        target.learn_dialect(probe)
        return target

    for name, flags in cast.ours.items():
        _say(f"starting {name}")
        url, ready_s = stack.enter_context(quire(model, flags.split(), logs / f"{name}.log"))
        session.start_s[name] = ready_s
        yield http(name, url, f"quire serve {flags}".strip())
    for name, url in cast.peers.items():
        yield http(name, url.rstrip("/").removesuffix("/v1"), url)
    for name, command in cast.commands.items():
        _say(f"starting {name}")
        url = stack.enter_context(from_command(command.replace("{model}", model), logs / f"{name}.log"))
        yield http(name, url, command.replace("{model}", local.path.name))
    if cast.has_offline:
        settings = next(iter(cast.ours.values()), "").split()
        _say("loading the model without a server")
        yield stack.enter_context(offline("offline", model, settings, logs / "offline.log"))


def _gate(local: Local, targets: Sequence[Target], session: Session) -> None:
    """Ask every target before anything is timed."""
    _say("correctness gate")
    prompts = gate_prompts(local)
    references = gate.reference_steps(local.path, prompts, GATE_OUT)
    for target in targets:
        verdicts = gate.check(target, prompts, references, local.decode)
        session.gate[target.name] = ", ".join(map(str, verdicts))


def gate_prompts(local: Local) -> list[list[int]]:
    """Passages that are the same prompt as text and as ids, so that servers that take only text see no other one."""
    ids, found = list(local.prose.token_ids), list[list[int]]()
    stride = max(1, (len(ids) - GATE_IN) // (4 * GATE_PROMPTS))
    for start in range(0, len(ids) - GATE_IN, stride):
        passage = ids[start : start + GATE_IN]
        if local.tokenizer.encode(local.decode(passage)) == passage:
            found.append(passage)
        if len(found) == GATE_PROMPTS:
            break
    return found


def _run_cells(plan: Plan, targets: Sequence[Target], prose: Prose, session: Session) -> None:
    warm_up(plan, targets, prose)
    session.outcomes += _run_loop("closed loop", plan.closed_cells(), targets, prose, session.slo)
    open_targets = [target for target in targets if not isinstance(target, OfflineTarget)]
    if open_targets and (plan.shares or plan.rates):
        capacity = capacity_per_s(session.outcomes, open_targets[0].name)
        session.outcomes += _run_loop("open loop", plan.open_cells(capacity), open_targets, prose, session.slo)


def _run_loop(name: str, cells: Sequence[Cell], targets: Sequence[Target], prose: Prose, slo: Slo) -> Iterator[Outcome]:
    """All cells, under a bar that tells how long the rest may take."""
    total = sum(effort(cell, prose) * cell.repeats for cell in cells) * len(targets)
    with tqdm(total=total, desc=name, bar_format=BAR) as bar:
        for cell in cells:
            told = partial(_advance, bar, effort(cell, prose), str(cell))
            yield run_cell(cell, targets, prose, slo, told)


def _advance(bar: "tqdm[NoReturn]", done: float, cell: str, target: str) -> None:
    bar.set_postfix_str(f"{cell}: {target}", refresh=False)
    bar.update(done)


def effort(cell: Cell, prose: Prose) -> float:
    """How long a run may take, beside others of its loop: by the moments of its requests, or by tokens.

    A prompt's token takes about a quarter of the time of an answer's.
    """
    if isinstance(cell.arrival, Poisson):
        return cell.num_requests / cell.arrival.rate_per_s
    questions = cell.mix.questions(prose, cell.num_requests, distinct_seed(cell, 0))
    return sum(question.num_out + len(question.prompt_ids) / 4 for question in questions)


def warm_up(plan: Plan, targets: Sequence[Target], prose: Prose) -> None:
    """As many short questions at once as ever will be, unmeasured."""
    num = max(plan.users)
    for target in targets:
        target.run(Closed(num), fixed(32, 4).questions(prose, num, f"warm-up/{target.name}"), "warm-up")


def run_cell(
    cell: Cell, targets: Sequence[Target], prose: Prose, slo: Slo, told: Callable[[str], None] = lambda name: None
) -> Outcome:
    """The cell on each target in turn, again and again; `told` hears whose run is done.

    Raises:
        ServerFailed: a target fails every request.
    """
    repeats: dict[str, list[Figures]] = {target.name: [] for target in targets}
    for repeat in range(cell.repeats):
        seed = distinct_seed(cell, repeat)
        questions = cell.mix.questions(prose, cell.num_requests, seed)
        for target in targets:
            run = target.run(cell.arrival, questions, seed)
            repeats[target.name].append(_figures(target, cell, run, slo))
            told(target.name)
    return Outcome(cell, repeats)


def _figures(target: Target, cell: Cell, run: Run, slo: Slo) -> Figures:
    errors = [record.error for record in run.records if record.error is not None]
    if len(errors) == len(run.records):
        raise ServerFailed(f"{target.name}: every request of {cell} failed: {errors[0]}")
    if isinstance(target, OfflineTarget):  # nobody saw when single tokens came
        run = replace(run, records=tuple(replace(record, first_s=None) for record in run.records))
    return figures_of(run, slo)


def capacity_per_s(outcomes: Sequence[Outcome], name: str) -> float:
    """Requests per second that a target reached at most, over the closed-loop cells of the first mix."""
    first_mix = outcomes[0].cell.mix.name
    rates = [one.medians()[name].requests_per_s for one in outcomes if one.cell.mix.name == first_mix]
    return max((rate for rate in rates if not math.isnan(rate)), default=1.0)


def _say(text: str) -> None:
    sys.stderr.write(f"{text} ...\n")
