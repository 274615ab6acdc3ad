"""The terminal chat against a small scripted server, and its own server's life."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from server.chat_cli import ChatError, Conversation, Endpoint, main


class Scripted(BaseHTTPRequestHandler):
    """Streams the last message back, word by word; answers "fail" with an error."""

    seen: ClassVar[list] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send(200, {"data": [{"id": "echo"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((body, self.headers.get("authorization")))
        text = body["messages"][-1]["content"]
        if text == "fail":
            self._send(400, {"error": {"message": "I will not."}})
            return
        events = [{"choices": [{"delta": {"content": word + " "}}]} for word in text.split()]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + [": keep-alive\n\n", "data: [DONE]\n\n"]
        self._reply(200, "text/event-stream", "".join(lines).encode())

    def _send(self, status, body):
        self._reply(status, "application/json", json.dumps(body).encode())

    def _reply(self, status, kind, content):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Scripted.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_conversation_is_remembered_and_forgotten(url):
    conversation = Conversation(Endpoint(url + "/v1", "key"), {"model": "echo"}, "Be kind.")
    out = io.StringIO()
    conversation.say("hello there", out)
    conversation.say("again", out)
    assert out.getvalue() == "hello there \nagain \n"
    body, authorization = Scripted.seen[-1]
    roles = [(message["role"], message["content"]) for message in body["messages"]]
    assert roles == [("system", "Be kind."), ("user", "hello there"), ("assistant", "hello there "), ("user", "again")]
    assert authorization == "Bearer key"
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]


def test_a_failed_message_is_not_remembered(url):
    conversation = Conversation(Endpoint(url), {"model": "echo"}, None)
    with pytest.raises(ChatError, match="400: I will not"):
        conversation.say("fail", io.StringIO())
    assert conversation.messages == []


def test_ctrl_c_keeps_what_was_said(url, monkeypatch):
    def interrupted(self, body):
        yield "half "
        raise KeyboardInterrupt

    monkeypatch.setattr(Endpoint, "stream", interrupted)
    conversation = Conversation(Endpoint(url), {"model": "echo"}, None)
    out = io.StringIO()
    conversation.say("hello", out)
    assert out.getvalue() == "half  [stopped]\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "half "}


def test_piped_input_gives_only_answers(url, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n\n/reset\nthree\n/exit\nnever\n"))
    assert main(["--base-url", url, "--temperature", "0", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "one two \nthree \n"
    assert [len(body["messages"]) for body, _ in Scripted.seen] == [1, 1]
    assert {key: Scripted.seen[0][0][key] for key in ("model", "temperature", "max_tokens", "stream")} == {
        "model": "echo",
        "temperature": 0,
        "max_tokens": 5,
        "stream": True,
    }


def test_a_piped_failure_is_told_and_counted(url, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("fail\nfine\n"))
    assert main(["--base-url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == "fine \n"
    assert "I will not" in captured.err


@pytest.mark.parametrize("base_url", ["localhost:8000", "ftp://x"])
def test_a_wrong_url_is_one_line(base_url, capsys):
    assert main(["--base-url", base_url]) == 1
    assert "--base-url must look like" in capsys.readouterr().err


def test_flags_for_a_server_go_not_with_a_base_url(url, capsys):
    assert main(["--base-url", url, "--dtype", "float32"]) == 2
    assert "--dtype" in capsys.readouterr().err


def test_a_server_that_cannot_start_is_told(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 1
    assert "the server stopped with status 1" in capsys.readouterr().err
