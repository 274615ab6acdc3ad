"""What is measured: a server behind an address, or the model in a process without a server. Each runs the same load.

A server is asked first what it understands (token ids as prompts, `ignore_eos`), so that any OpenAI-compatible one can
be measured; its own answers say what it serves.
"""

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bench.arrivals import Arrival, Closed
from bench.client import Client, Endpoint
from bench.figures import Record, Run
from bench.machine import ROOT
from bench.processes import ServerFailed, get, post, stop, tail
from bench.sse import Exchange, record_of
from bench.workloads import Question

Decode = Callable[[Sequence[int]], str]
Route = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself; None where it does not.

    Attributes:
        how: settings it was started with, for the table.
    """

    model: str | None = None
    dtype: str | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    how: str = ""


class Target(Protocol):
    """What can be given a load."""

    name: str
    served: Served

    def run(self, arrival: Arrival, questions: Sequence[Question], seed: str) -> Run:
        """Answer all questions, arriving as `arrival` says."""

    def greedy(self, prompt_ids: Sequence[int], num_out: int) -> tuple[list[int] | None, str]:
        """The greedy answer's token ids (None when they are not told) and its text."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server is asked: prompts as token ids or text, and how it is told not to stop early."""

    as_ids: bool
    keep_going: Literal["ignore_eos", "generation_config", "nothing"]

    def extras(self, num_out: int) -> dict[str, Any]:
        """Fields beside prompt and length."""
        if self.keep_going == "ignore_eos":
            return {"ignore_eos": True, "stream_options": {"include_usage": True}}
        if self.keep_going == "generation_config":  # how transformers' server is told
            settings = {"do_sample": False, "min_new_tokens": num_out, "max_new_tokens": num_out}
            return {"generation_config": json.dumps(settings)}
        return {"stream_options": {"include_usage": True}}


DIALECTS = (
    Dialect(True, "ignore_eos"),
    Dialect(False, "ignore_eos"),
    Dialect(False, "generation_config"),
    Dialect(False, "nothing"),
)
"""From the most exact to what every server understands."""


@dataclass(slots=True)
class HttpTarget:
    """A server behind `url` (without `/v1`)."""

    name: str
    url: str
    decode: Decode
    route: Route = "completions"
    api_key: str | None = None
    how: str = ""
    served: Served = field(init=False)
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        self.served = describe(self.url, self.how, self._headers())
        self.dialect = DIALECTS[-1]

    def learn_dialect(self, question: Question) -> None:
        """Find out how this server can be asked. Raises ServerFailed when in no way."""
        problems = []
        for dialect in DIALECTS:
            if dialect.as_ids and self.route == "chat":
                continue
            self.dialect = dialect
            [record] = self.run(Closed(1), [question], "probe").records
            is_misread = dialect.as_ids and abs(record.num_prompt_tokens - len(question.prompt_ids)) > 1
            if record.error is None and not is_misread:
                return
            problems.append(record.error or f"read {record.num_prompt_tokens} prompt tokens")
        raise ServerFailed(f"{self.name} at {self.url} cannot be asked: {'; '.join(problems)}")

    def run(self, arrival: Arrival, questions: Sequence[Question], seed: str) -> Run:
        """Send the questions; a fresh event loop and fresh connections each time."""
        endpoint = Endpoint.of(f"{self.url}{self._path()}", self.api_key)
        requests = [endpoint.request(self._body(question, stream=True)) for question in questions]
        began_cpu_s = time.process_time()
        exchanges = _run_loop(_exchange_all(endpoint, arrival, requests, random.Random(seed)))
        cpu_s = time.process_time() - began_cpu_s
        return Run(tuple(map(record_of, exchanges)), cpu_s)

    def greedy(self, prompt_ids: Sequence[int], num_out: int) -> tuple[list[int] | None, str]:
        """Asked for as text completion, whole. Raises ServerFailed."""
        body = self._body(Question(tuple(prompt_ids), num_out), stream=False, route="completions")
        body.pop("stream_options", None)
        if self.dialect.keep_going == "ignore_eos":
            body["return_token_ids"] = True
        answer = post(f"{self.url}/v1/completions", body, headers=self._headers())
        choice = answer["choices"][0]
        return choice.get("token_ids"), choice["text"]

    def _path(self) -> str:
        return "/v1/chat/completions" if self.route == "chat" else "/v1/completions"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def _body(self, question: Question, *, stream: bool, route: Route | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": question.num_out, "temperature": 0, "stream": stream}
        if self.served.model is not None:
            body["model"] = self.served.model
        if (route or self.route) == "chat":
            body["messages"] = [{"role": "user", "content": self.decode(question.prompt_ids)}]
        else:
            ids = list(question.prompt_ids)
            body["prompt"] = ids if self.dialect.as_ids else self.decode(ids)
        return body | self.dialect.extras(question.num_out)


def _run_loop(work: Any) -> list[Exchange]:
    try:
        import uvloop
    except ImportError:  # a platform without it
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _exchange_all(
    endpoint: Endpoint, arrival: Arrival, requests: Sequence[bytes], rng: random.Random
) -> list[Exchange]:
    client = Client(endpoint)
    try:
        return await arrival.send(client, requests, rng)
    finally:
        client.close()


def describe(url: str, how: str, headers: Mapping[str, str]) -> Served:
    """What a server tells: the model's name, and where there are such figures its dtype and sizes."""
    listing = get(f"{url}/v1/models", headers=dict(headers))
    metrics = (get(f"{url}/metrics", headers=dict(headers)) or b"").decode(errors="replace")
    card: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError, LookupError, TypeError):
        card = json.loads(listing or b"")["data"][0]
    dtype = re.search(r'quire_model_info\{[^}]*dtype="([^"]+)"', metrics)
    weight_bytes = metric(metrics, "quire_weight_bytes")
    if weight_bytes is None:
        weight_bytes = (card.get("meta") or {}).get("size")  # llama.cpp's
    return Served(
        model=card.get("id"),
        dtype=dtype[1] if dtype else None,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=metric(metrics, "quire_kv_bytes_per_token"),
        how=how,
    )


def metric(text: str, name: str) -> int | None:
    """The value of a gauge without labels in Prometheus' text."""
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return int(float(match[1])) if match else None


# ------------------------------------------------------------------------------------------------- without a server


class OfflineTarget:
    """The model in a process of its own, without HTTP, in batches of as many prompts as there are users."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", served: Served) -> None:
        self.name = name
        self.served = served
        self._process = process

    def run(self, arrival: Arrival, questions: Sequence[Question], seed: str) -> Run:
        """Batch after batch; nobody sees single requests, so there are no latencies."""
        if not isinstance(arrival, Closed):
            raise ValueError("offline runs know no arrivals but batches")
        asked = [{"prompt": list(question.prompt_ids), "max_tokens": question.num_out} for question in questions]
        answer = self._ask({"batch": arrival.num_users, "questions": asked})
        records = tuple(
            Record(0.0, answer["wall_s"], num_prompt_tokens=num_in, num_output_tokens=num_out)
            for num_in, num_out in answer["lengths"]
        )
        return Run(records, given_wall_s=answer["wall_s"])

    def greedy(self, prompt_ids: Sequence[int], num_out: int) -> tuple[list[int] | None, str]:
        """As behind HTTP."""
        asked = [{"prompt": list(prompt_ids), "max_tokens": num_out}]
        answer = self._ask({"batch": 1, "questions": asked, "with_tokens": True})
        return answer["token_ids"][0], ""

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return ask_process(self._process, command)


def ask_process(process: "subprocess.Popen[str]", command: Mapping[str, Any]) -> dict[str, Any]:
    """One JSON line to a process, one back. Raises ServerFailed when it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise ServerFailed("the offline process has ended") from None
    line = process.stdout.readline()
    if not line:
        raise ServerFailed("the offline process ended without an answer")
    answer: dict[str, Any] = json.loads(line)
    return answer


@contextlib.contextmanager
def offline(name: str, model: str, flags: Sequence[str], log: Path) -> Iterator[OfflineTarget]:
    """An offline process with these flags of `quire serve`. Raises ServerFailed with its log when it does not load."""
    command = [sys.executable, "-m", "bench.offline", model, *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        try:
            told = ask_process(process, {})
        except ServerFailed as error:
            raise ServerFailed(f"{error}:\n{tail(log)}") from error
        how = f"without a server {' '.join(flags)}".strip()
        yield OfflineTarget(name, process, Served(Path(model).name, how=how, **told))
    finally:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        stop(process)  # type: ignore[arg-type]  # text or bytes makes no difference to ending it
