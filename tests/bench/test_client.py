"""The load generator's client and parser: whole answers however their bytes are cut, and failures said plainly."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.arrivals import Closed
from bench.client import Client, Endpoint
from bench.processes import ServerFailed
from bench.sse import END_OF_CHUNKS, ChunkReader, Exchange, parse_head, record_of, timed_events
from bench.targets import DIALECTS, Dialect, HttpTarget, describe, metric
from bench.workloads import Question

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Grüße"}}]},
    {"choices": [{"text": "\r\n0\r\n\r\n"}]},
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
    },
]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: Chunked\r\n\r\n"


def stream_of(events):
    return [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b": keep-alive\n\n", b"data: [DONE]\n\n"]


def chunked(parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_an_answer_is_the_same_however_its_bytes_are_cut(sizes):
    data, pieces, at = HEAD + chunked(stream_of(EVENTS)), [], 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append((float(at + size), data[at : at + size]))
        at += size
    record = record_of(Exchange(0.0, pieces, ended_s=99.0))
    assert record.error is None
    assert record.text == "Grüße\r\n0\r\n\r\nhm"
    assert len(record.gaps_s) == 2
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (9, 4, 2)


def test_an_event_has_the_moment_of_its_last_byte():
    first, second = b"data: 1\n", b"\ndata: 2\n\n"
    assert list(timed_events([(1.0, first), (2.0, second)], is_chunked=False)) == [(2.0, "1"), (2.0, "2")]


def test_chunks_are_read_across_pieces_and_extensions():
    reader = ChunkReader()
    assert reader.feed(b"3;x=y\r\nab") == b""
    assert reader.feed(b"c\r\n1\r\nd\r\n0\r\n\r\n") == b"abcd"


def test_the_end_of_chunks_cannot_stand_inside_an_event():
    assert END_OF_CHUNKS not in b"".join(stream_of(EVENTS))


def test_a_head_tells_how_the_body_ends():
    assert parse_head(b"HTTP/1.1 404 Not Found\r\nContent-Length: 12").length == 12
    assert parse_head(HEAD.removesuffix(b"\r\n\r\n")).is_chunked


def test_a_refusal_and_an_error_inside_a_stream_become_the_records_error():
    refused = Exchange(0.0, [(1.0, b"HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\nnope")], 1.0)
    assert "400: nope" in record_of(refused).error
    broken = Exchange(0.0, [(1.0, HEAD + chunked(stream_of([{"error": {"message": "dead"}}])))], 1.0)
    assert "dead" in record_of(broken).error
    empty = Exchange(0.0, [(1.0, HEAD + chunked([b"data: [DONE]\n\n"]))], 1.0)
    assert record_of(empty).error == "an answer without content"


@contextlib.asynccontextmanager
async def raw_server(*answers):
    """A server that gives each request the next answer, as pieces; None closes the connection instead."""
    waiting, connections = iter(answers), []

    async def serve(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(parse_head(head.replace(b"POST /x ", b"HTTP/1.1 200 ").strip()).length)
                answer = next(waiting)
                for piece in answer or ():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if answer is None or b"close" in b"".join(answer):
                    writer.close()
                    return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], False, "/x"), connections
    finally:
        server.close()


async def ask(endpoint, number):
    client = Client(endpoint)
    try:
        return [await client.ask(endpoint.request({}), float(index)) for index in range(number)]
    finally:
        client.close()


async def test_a_connection_is_kept_for_the_next_request():
    whole = HEAD + chunked(stream_of(EVENTS))
    async with raw_server([whole[:90], whole[90:200], whole[200:]], [whole]) as (endpoint, connections):
        exchanges = await ask(endpoint, 2)
    assert len(connections) == 1
    assert [record_of(exchange).error for exchange in exchanges] == [None, None]
    assert len(exchanges[0].pieces) >= 1


async def test_a_kept_connection_that_was_closed_is_replaced():
    whole = HEAD + chunked(stream_of(EVENTS))
    async with raw_server([whole], None, [whole]) as (endpoint, connections):
        exchanges = await ask(endpoint, 2)
    assert len(connections) == 2
    assert [exchange.failure for exchange in exchanges] == [None, None]


async def test_a_body_may_end_with_the_connection_and_a_chunked_one_may_not():
    plain = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(stream_of(EVENTS))
    cut = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"3\r\nabc"
    async with raw_server([plain], [cut]) as (endpoint, _):
        exchanges = await ask(endpoint, 2)
    assert record_of(exchanges[0]).num_output_tokens == 4
    assert "broke" in exchanges[1].failure


async def test_nobody_listening_is_a_failure_and_no_exception():
    [exchange] = await ask(Endpoint("127.0.0.1", 1, False, "/x"), 1)
    assert "no connection" in exchange.failure


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://"])
def test_an_address_must_be_one(url):
    with pytest.raises(ValueError, match="is no http"):
        Endpoint.of(url)


def text_of(ids):
    return bytes(ids).decode()


QUESTIONS = [Question(tuple(f"count {number} please".encode()), 8) for number in range(6)]


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_our_server_is_asked_in_its_most_exact_dialect_and_every_answer_counted(live_url, route):
    target = HttpTarget("ours", live_url, text_of, route)
    target.learn_dialect(QUESTIONS[0])
    assert target.dialect == Dialect(route == "completions", "ignore_eos")
    run = target.run(Closed(3), QUESTIONS, "seed")
    assert [record.error for record in run.records] == [None] * 6
    assert [record.num_output_tokens for record in run.records] == [8] * 6
    assert all(record.ttft_s > 0 and record.tpot_s > 0 for record in run.records)
    assert all(record.text.startswith("1, 2") for record in run.records)
    if route == "completions":
        assert [record.num_prompt_tokens for record in run.records] == [len(q.prompt_ids) for q in QUESTIONS]


def test_greedy_answers_come_with_token_ids_where_the_server_gives_them(live_url):
    target = HttpTarget("ours", live_url, text_of)
    target.learn_dialect(QUESTIONS[0])
    token_ids, text = target.greedy(QUESTIONS[0].prompt_ids, 6)
    assert text_of(token_ids) == text == "1, 2, "


def test_what_a_server_says_of_itself_is_read(live_url):
    served = describe(live_url, "flags", {})
    assert (served.model, served.how) == ("tiny", "flags")
    assert metric("a_b 3\nquire_weight_bytes 2.5e+08\n", "quire_weight_bytes") == 250_000_000
    assert metric("x_quire_weight_bytes 1\n", "quire_weight_bytes") is None


def test_a_server_that_answers_nothing_is_named():
    with pytest.raises(ServerFailed, match=r"dead at http://127\.0\.0\.1:1 cannot be asked"):
        HttpTarget("dead", "http://127.0.0.1:1", text_of).learn_dialect(QUESTIONS[0])


def test_transformers_is_told_the_length_in_its_own_way():
    [dialect] = [one for one in DIALECTS if one.keep_going == "generation_config"]
    assert json.loads(dialect.extras(5)["generation_config"])["min_new_tokens"] == 5
