"""Over real sockets: a generated client sends whatever the OpenAPI document allows, and a huge body meets its limit."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.server.live import live_server


@pytest.fixture(scope="module")
def live() -> Iterator[str]:
    with live_server(max_request_bytes=1_000_000) as server:
        yield server.url


@pytest.mark.slow
def test_nothing_the_document_allows_gives_a_5xx(live: str) -> None:
    operations = [result.ok() for result in schemathesis.openapi.from_url(f"{live}/openapi.json").get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:
        has_body = operation.method.upper() == "POST"

        @settings(max_examples=60 if has_body else 3, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            answer = case.call(timeout=30)
            limits = isinstance(case.body, dict) and {"timeout_ms", "queue_timeout_ms"} & set(case.body)
            allowed = (504,) if limits else ()
            assert answer.status_code < 500 or answer.status_code in allowed, (answer.status_code, answer.content)
            assert "x-request-id" in answer.headers

        check()


def send_padded(live: str, chunked: bool) -> bytes:
    """Send a body of 20 MB as long as the server listens; what it answered."""
    port = int(live.rsplit(":", 1)[1])
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 20000000"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    piece = b" " * 65536
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(head.encode())
            for _ in range(300):
                connection.sendall(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
    return answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_gets_its_413_over_a_socket(live: str, chunked: bool) -> None:
    head, _, body = send_padded(live, chunked).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    assert json.loads(body)["error"]["code"] == "request_too_large"
    assert httpx.get(f"{live}/health").status_code == 200


def test_head_and_streams_over_a_socket(live: str) -> None:
    with httpx.Client(base_url=live) as client:
        assert client.head("/v1/models").content == b""
        body = {"prompt": "SAY:hello|", "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
        assert "".join(texts) == "hello"
