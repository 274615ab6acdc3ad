import io
import json
import logging

import pytest

from server.logs import log_access, logging_to

LOG = logging.getLogger("quire.test")


def lines_of(write, level="info", log_format="text"):
    stream = io.StringIO()
    with logging_to(stream, level, log_format):
        write()
    return stream.getvalue().splitlines()


def test_a_text_line_has_level_name_message_and_fields():
    (line,) = lines_of(lambda: LOG.info("hello %s", "you", extra={"model": "a b", "tokens": 3, "seconds": 1.23456}))
    assert line.endswith('info    quire.test: hello you model="a b" tokens=3 seconds=1.235')


def test_a_json_line_is_an_object_with_the_same():
    (line,) = lines_of(lambda: LOG.warning("hello %s", "you", extra={"tokens": 3}), log_format="json")
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    expected = {"level": "warning", "logger": "quire.test", "message": "hello you", "tokens": 3}
    assert record == expected


def test_nobody_can_forge_a_line():
    (line,) = lines_of(lambda: LOG.info("id %s", "x\n2026 error", extra={"path": "/a\nerror"}))
    assert "\\n" in line
    assert len(lines_of(lambda: LOG.info("id %s", "x\ny"), log_format="json")) == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_kept(log_format):
    def write():
        try:
            raise KeyError("lost")
        except KeyError:
            LOG.exception("it broke")

    text = "\n".join(lines_of(write, log_format=log_format))
    assert "KeyError: 'lost'" in text
    assert "it broke" in text


def test_the_level_is_obeyed_and_restored():
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    lines = lines_of(lambda: (LOG.info("no"), LOG.error("yes"), logging.getLogger("httpx").info("no")), level="warning")
    assert len(lines) == 1
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


def test_an_access_line_carries_the_request_id():
    (line,) = lines_of(lambda: log_access("req-1", "POST", "/v1/completions", 200, 0.5), log_format="json")
    record = json.loads(line)
    assert (record["request_id"], record["status"], record["message"]) == ("req-1", 200, "POST /v1/completions")


def test_probes_are_logged_in_debug_only():
    assert lines_of(lambda: log_access("req-1", "GET", "/ready", 200, 0.001)) == []
    assert len(lines_of(lambda: log_access("req-1", "GET", "/ready", 200, 0.001), level="debug")) == 1
