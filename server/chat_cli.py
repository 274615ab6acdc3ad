"""`quire chat`: a conversation in the terminal, with a running server or with one started for the occasion.

Knows the OpenAI chat stream and the terminal; talks plain HTTP, so it works against any server of that API. Piped, it
reads one message a line and prints only the answers.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import urlsplit

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."
STOP_S = 10.0


class ChatError(Exception):
    """Something a person at the terminal should read in one line."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server: its base URL (with or without `/v1`) and key."""

    base_url: str
    api_key: str | None = None

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """One request; leaving the block closes the connection, which also ends a running answer.

        Raises:
            ChatError: the server cannot be reached, or answers with an error.
        """
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ChatError(f"--base-url must look like http://host:port, got {self.base_url!r}")
        connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = connect(url.hostname, url.port)
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, prefix + path, body=payload, headers=headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise ChatError(_error_message(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.base_url}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()

    def model(self) -> str:
        """The first model the server offers."""
        with self.request("GET", "/v1/models") as response:
            models = json.load(response).get("data") or []
        if not models:
            raise ChatError(f"{self.base_url} offers no model")
        return str(models[0]["id"])

    def stream(self, body: dict[str, Any]) -> Generator[str, None, None]:
        """The pieces of an answer as they come."""
        with self.request("POST", "/v1/chat/completions", body | {"stream": True}) as response:
            for line in response:
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                for choice in event["choices"]:
                    delta = choice["delta"]
                    yield delta.get("reasoning_content") or delta.get("content") or ""


def _error_message(response: http.client.HTTPResponse) -> str:
    raw = response.read()
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode("utf-8", "replace")
    return f"{response.status}: {message}"


class Conversation:
    """The messages so far; an answer that failed or was stopped keeps what was said."""

    def __init__(self, endpoint: Endpoint, options: dict[str, Any], system: str | None) -> None:
        self._endpoint = endpoint
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def reset(self) -> None:
        """Begin anew, with the same system message."""
        self.messages = list(self._opening)

    def say(self, text: str, out: TextIO) -> None:
        """Send one message and write the answer as it comes; Ctrl-C ends the answer, not the conversation."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            with contextlib.closing(self._endpoint.stream(self._options | {"messages": asked})) as stream:
                for piece in stream:
                    pieces.append(piece)
                    out.write(piece)
                    out.flush()
        except KeyboardInterrupt:
            out.write(" [stopped]")
        out.write("\n")
        out.flush()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def main(argv: Sequence[str]) -> int:
    """Run `quire chat ARGV`; returns the exit status."""
    args, serve_argv = _parser().parse_known_args(argv)
    if args.base_url is not None and serve_argv:
        sys.stderr.write(f"quire chat: {serve_argv[0]} is for a server started here; it goes not with --base-url\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a server of ours is stopped
    try:
        with contextlib.ExitStack() as stack:
            base_url = args.base_url or stack.enter_context(started_server(serve_argv, sys.stderr))
            endpoint = Endpoint(base_url, args.api_key or os.environ.get("OPENAI_API_KEY"))
            options = {"model": args.model or endpoint.model()}
            for name in ("temperature", "max_tokens", "seed"):
                if getattr(args, name) is not None:
                    options[name] = getattr(args, name)
            return _converse(Conversation(endpoint, options, args.system), options["model"])
    except ChatError as error:
        sys.stderr.write(f"quire chat: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire chat",
        description=f"Talk to a model. {HELP}",
        epilog="Without --base-url a server is started here and stopped at the end; MODEL and every flag of `quire "
        "serve` may then be given too.",
        allow_abbrev=False,
    )
    parser.add_argument("--base-url", metavar="URL", help="a running server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", metavar="NAME", help="which of its models (the first)")
    parser.add_argument("--api-key", metavar="KEY", help="its key (env OPENAI_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="length of an answer at most")
    parser.add_argument("--seed", type=int, metavar="N")
    return parser


def _converse(conversation: Conversation, model: str) -> int:
    """Read messages until the end of input; the exit status is 1 when a piped message could not be answered."""
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stdout.write(f"{model}. {HELP}\n")
    failed = False
    for text in _messages(interactive):
        if text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
            continue
        if not text:
            continue
        try:
            conversation.say(text, sys.stdout)
        except ChatError as error:
            failed = True
            sys.stderr.write(f"{error}\n")
    return 1 if failed and not interactive else 0


def _messages(interactive: bool) -> Iterator[str]:
    if not interactive:
        for line in sys.stdin:
            yield line.strip()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for `input`
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


@contextlib.contextmanager
def started_server(serve_argv: Sequence[str], log: TextIO) -> Iterator[str]:
    """A server of our own on a free port, ready; yields its base URL and stops it at the end.

    Raises:
        ChatError: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "server.cli", "serve", "--log-level", "warning", *serve_argv]
    # In a process group of its own, so that Ctrl-C at the terminal stops the answer and not the server.
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], start_new_session=True)
    try:
        _wait_until_ready(server, Endpoint(f"http://127.0.0.1:{port}"), log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: "subprocess.Popen[bytes]", endpoint: Endpoint, log: TextIO) -> None:
    said = ""
    while server.poll() is None:
        try:
            with endpoint.request("GET", "/ready"):
                return
        except ChatError as error:
            phase = str(error).partition("Not ready: ")[2]
        if phase and phase != said and log.isatty():
            log.write(f"{phase}\n")
            said = phase
        time.sleep(0.05)
    raise ChatError(f"the server stopped with status {server.returncode}")
