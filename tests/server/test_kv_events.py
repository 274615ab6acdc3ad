"""KV events as a router sees them: through its own ZeroMQ socket and a decoder of vLLM's types."""

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvpool.prefix import namespace_root
from scheduler.observer import StepReport
from scheduler.offload import Backing
from server.flags import ConfigError
from server.kv_events import END_OF_REPLAY, EventSettings, KVEvents
from tests.scheduler.harness import house, request

STEP = StepReport(1, 1, 0, 0, 0.0, 0.0, 0.0, 1, 0)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """As in vLLM, so that a change of ours that its receivers could not read fails here."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Router:
    """A subscriber that mirrors what a server holds."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, topic: str = "kv") -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)
        self.blocks: dict[bytes | int, BlockStored] = {}
        self.numbers: list[int] = []
        self.num_cleared = 0

    def listen(self, patience_ms: int = 300) -> None:
        """Take in everything that comes until it has been quiet for a while."""
        while self.socket.poll(patience_ms):
            _, number, payload = self.socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            self.take(DECODER.decode(payload))

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                self.blocks |= dict.fromkeys(event.block_hashes, event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[block_hash]
            else:
                self.blocks.clear()
                self.num_cleared += 1


@pytest.fixture
def context() -> "Iterator[zmq.Context[Any]]":
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('kv')}/events"


def settings(endpoint: str, replay: str | None = None, block_size: int = 4) -> EventSettings:
    return EventSettings(endpoint, replay, "kv", block_size, "GPU")


async def test_a_router_can_follow_what_the_cache_holds(context: "zmq.Context[Any]", endpoint: str) -> None:
    events = KVEvents(settings(endpoint))
    router = Router(context, endpoint)
    stranger = Router(context, endpoint, "other")
    router.listen()  # the connection stands
    async with house(num_blocks=24, backing=Backing(None, events)) as h:
        told, h.watcher.on_step = h.watcher.on_step, lambda report: (told(report), events.on_step(report))  # type: ignore[assignment,method-assign,return-value]
        for number in range(6):
            namespace = namespace_root(str(number))
            await h.answer(request([number, *range(30)], 4, cache_namespace=namespace))
        router.listen()
        index = h.scheduler._roster.running.prefix_index
        assert len(index) > 8
        assert set(router.blocks) == set(index._block_of)
        assert router.numbers == list(range(len(router.numbers)))
        assert len(router.numbers) > 3
        assert router.num_cleared == 1, "whatever was known before is void"
        stored = {id(e): e for e in router.blocks.values()}.values()
        assert {(e.block_size, e.medium, e.lora_id, e.lora_name) for e in stored} == {(4, "GPU", None, None)}
        first = next(e for e in stored if e.parent_block_hash is None)
        assert first.token_ids[1:] == list(range(len(first.token_ids) - 1))
    stranger.listen(50)
    assert not stranger.numbers


def test_missed_messages_can_be_replayed(context: "zmq.Context[Any]", endpoint: str) -> None:
    events = KVEvents(settings(endpoint, endpoint + "-replay"))
    for number in range(5):
        events.on_removed(bytes([number]) * 32)
        events.on_step(STEP)
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint + "-replay")
    received: list[tuple[bytes, bytes]] = []
    for first in (3, 0):
        while len(received) < (2 if first == 3 else 5):
            received.clear()  # the publisher may not have sent all of them when it is asked first
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while (reply := socket.recv_multipart())[1] != END_OF_REPLAY:
                received.append((reply[1], reply[2]))
        assert [int.from_bytes(number, "big") for number, _ in received] == list(range(first, 5))
        told = [event for _, payload in received for event in DECODER.decode(payload).events]
        hashes = [event.block_hashes for event in told if isinstance(event, BlockRemoved)]
        assert hashes == [[bytes([number]) * 32] for number in range(first, 5)]
        received.clear()
    socket.send_multipart((b"", b"nonsense and more"))  # ignored
    events.close()
    events.close()


def test_steps_without_changes_send_nothing(context: "zmq.Context[Any]", endpoint: str) -> None:
    events = KVEvents(settings(endpoint))
    router = Router(context, endpoint)
    router.listen()
    for _ in range(3):
        events.on_step(STEP)
    router.listen()
    assert (router.numbers, router.num_cleared) == ([0], 1)
    events.close()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"need zmq, .* pip install 'quire\[events\]'"):
        KVEvents(settings(endpoint))


def test_an_endpoint_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot bind tcp://nowhere\.invalid:1"):
        KVEvents(settings("tcp://nowhere.invalid:1"))
