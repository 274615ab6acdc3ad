"""`quire generate`: a file of prompts in, a file of answers out, one JSON object a line, in the same order.

Knows files, lines and progress; the answers come from `server.llm`. A line that cannot be answered becomes a line that
says why. What is written is whole, so an interrupted run can be taken up again.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from server.config import ServerConfig, read_config
from server.flags import ConfigError

if TYPE_CHECKING:
    from server.errors import ApiError
    from server.llm import LLM

KEY = "custom_id"


class LineError(ValueError):
    """An input line that is no request."""


def main(argv: Sequence[str]) -> int:
    """Run `quire generate ARGV`; returns 0 when every line was answered, 1 when some were not, 2 for wrong usage."""
    args, serve_argv = _parser().parse_known_args(argv)
    try:
        params = _params(args.params)
        config = read_config([*serve_argv, *([args.model] if args.model else [])])
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(_source(args.input))
            num_done = _prepare(args.output, resume=args.resume, overwrite=args.overwrite)
            target = stack.enter_context(_target(args.output))
            return _generate(source, target, params, num_done, config)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"quire generate: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire generate",
        description='Answer a JSONL file. Each line is a request: {"prompt": ...} or {"messages": ...}, any field of '
        f'the HTTP API, and optionally "{KEY}", which is given back. Each line of the output has its index, the '
        "answer's text and the whole response, or an error.",
        epilog="Every flag of `quire serve` that concerns the model and the engine works too.",
        allow_abbrev=False,
    )
    parser.add_argument("input", metavar="INPUT", help="JSONL file, or - for standard input")
    parser.add_argument("--output", "-o", metavar="FILE", default="-", help="JSONL file (standard output)")
    parser.add_argument("--model", metavar="MODEL", help="folder, .gguf file or hub id (the embedded model)")
    parser.add_argument(
        "--params", metavar="JSON", default="{}", help='fields for lines without them: {"max_tokens": 64}'
    )
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run into FILE stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    return parser


def _params(text: str) -> dict[str, Any]:
    try:
        params = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--params is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError("--params must be a JSON object")
    return params


@contextlib.contextmanager
def _source(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
    else:
        with open(name, "rb") as file:
            yield file


@contextlib.contextmanager
def _target(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdout.buffer
    else:
        with open(name, "ab") as file:
            yield file


def _prepare(output: str, *, resume: bool, overwrite: bool) -> int:
    """Make the output ready to be appended to; how many lines it already has.

    Raises:
        ConfigError: it exists, and nobody said what to do about that.
    """
    path = Path(output)
    if output == "-" or not path.exists():
        return 0
    if overwrite:
        path.write_bytes(b"")
        return 0
    if not resume:
        raise ConfigError(f"{output} exists; --resume goes on with it, --overwrite replaces it")
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]  # a line that was being written when the run stopped is done again
    with path.open("r+b") as file:
        file.truncate(len(whole))
    return whole.count(b"\n")


def _generate(
    source: BinaryIO, target: BinaryIO, params: Mapping[str, Any], num_done: int, config: ServerConfig
) -> int:
    from engine.errors import LoadError
    from server.llm import LLM

    lines = [line for line in source.read().splitlines() if line.strip()][num_done:]
    try:
        llm = LLM(config=config, progress=sys.stderr.isatty())
    except LoadError as error:
        raise ConfigError(str(error)) from error
    num_failed = 0
    with llm, tqdm(total=len(lines), unit="line", disable=not sys.stderr.isatty()) as bar:
        for index, record in enumerate(_records(llm, lines, params), num_done):
            num_failed += "error" in record
            target.write(json.dumps({"index": index, **record}, ensure_ascii=False).encode() + b"\n")
            target.flush()
            bar.update()
    if num_failed:
        sys.stderr.write(f"quire generate: {num_failed} of {len(lines)} lines could not be answered\n")
    return 1 if num_failed else 0


def _records(llm: "LLM", lines: Sequence[bytes], params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is written for each line, in order."""
    requests = [_request(line, params) for line in lines]
    answers = llm.answers(body for body, _ in requests if not isinstance(body, LineError))
    for body, key in requests:
        answer = body if isinstance(body, LineError) else next(answers)
        yield ({KEY: key} if key is not None else {}) | _record(answer)


def _request(line: bytes, params: Mapping[str, Any]) -> tuple[dict[str, Any] | LineError, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        return LineError(f"the line is not JSON: {error}"), None
    if not isinstance(request, dict):
        return LineError("the line must be a JSON object"), None
    key = request.pop(KEY, None)
    if ("prompt" in request) == ("messages" in request):
        return LineError("the line must have either prompt or messages"), key
    return {**params, **request}, key


def _record(answer: "Mapping[str, Any] | ApiError | LineError") -> dict[str, Any]:
    if isinstance(answer, LineError):
        return {"error": {"message": str(answer), "type": "invalid_request_error", "param": None, "code": None}}
    if isinstance(answer, Exception):
        return answer.body()
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"].get("content")
    return {"text": text, "response": answer}
