"""What the prefix cache holds, told to routers as it changes: vLLM's KV events over ZeroMQ.

Each message has three frames: the topic, a sequence number (8 bytes, big-endian, from 0), and a msgpack map

    {"ts": Unix seconds, "events": [event, ...], "data_parallel_rank": 0}

whose events are maps tagged by `type`, field by field those of vLLM's `KVEventBatch`:

    BlockStored        block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
    BlockRemoved       block_hashes, medium
    AllBlocksCleared   (also the first event of all: whatever was known of this server before is void)

A hash is the 32 bytes of the block's digest. One message a step. Whoever missed messages may ask the replay socket
(REQ/DEALER to our ROUTER) with the first number wanted, in 8 bytes; it answers with `[empty, number, payload]` for each
message it still has, and `-1` with an empty payload at the end. Knows digests and sockets; knows no requests.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvpool.prefix import NullPrefixListener, PrefixBlock
from scheduler.observer import NullObserver, StepReport
from server.flags import ConfigError

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
NUM_KEPT = 10_000
"""Messages that can be replayed."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Where and about what.

    Attributes:
        endpoint: that the PUB socket binds, such as tcp://*:5557.
        replay_endpoint: that the replay socket binds; None for none.
        medium: where blocks live, in the receivers' words: GPU or CPU.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    block_size: int
    medium: str


class KVEvents(NullPrefixListener, NullObserver):
    """Listens to the prefix index, and publishes what it heard after each step.

    As a scheduler's observer it learns when a step is over; its sockets live on a thread of their own.
    """

    def __init__(self, settings: EventSettings) -> None:
        """Bind the sockets.

        Raises:
            ConfigError: the libraries are missing, or an endpoint cannot be bound.
        """
        self._zmq, self._msgpack = _libraries()
        self._settings = settings
        self._events: list[Event] = [{"type": "AllBlocksCleared"}]
        self._context = self._zmq.Context()
        self._to_thread = self._context.socket(self._zmq.PUSH)
        self._to_thread.bind("inproc://events")
        try:
            publisher = _Publisher(self._zmq, self._context, settings)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=publisher.run, name="kv-events", daemon=True)
        self._thread.start()

    def on_stored(self, block: PrefixBlock) -> None:
        """A block that follows the one told just before joins its event."""
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and last["block_hashes"][-1] == block.parent:
            last["block_hashes"].append(block.digest)
            last["token_ids"].extend(block.token_ids)
            return
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [block.digest],
                "parent_block_hash": block.parent,
                "token_ids": list(block.token_ids),
                "block_size": self._settings.block_size,
                "lora_id": None,
                "medium": self._settings.medium,
                "lora_name": None,
            }
        )

    def on_removed(self, digest: bytes) -> None:
        """Blocks removed one after the other share an event."""
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockRemoved":
            last["block_hashes"].append(digest)
        else:
            self._events.append({"type": "BlockRemoved", "block_hashes": [digest], "medium": self._settings.medium})

    def on_cleared(self) -> None:
        """Nothing told before matters."""
        self._events = [{"type": "AllBlocksCleared"}]

    def on_step(self, report: StepReport) -> None:
        """Publish what has changed, if anything has."""
        if not self._events or self._to_thread.closed:
            return
        batch = {"ts": time.time(), "events": self._events, "data_parallel_rank": 0}
        self._to_thread.send(self._msgpack.encode(batch))
        self._events = []

    def close(self) -> None:
        """Send what is queued and unbind. Harmless when repeated."""
        if self._to_thread.closed:
            return
        self._to_thread.send(b"")
        self._thread.join()
        self._to_thread.close()
        self._context.term()


class _Publisher:
    """The sockets, their numbering and the memory for replays; all of it lives on one thread but the constructor."""

    def __init__(self, zmq: ModuleType, context: Any, settings: EventSettings) -> None:
        self._zmq = zmq
        self._topic = settings.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=NUM_KEPT)
        self._num_sent = 0
        self._inbox = context.socket(zmq.PULL)
        self._inbox.connect("inproc://events")
        self._sockets = {"publish": context.socket(zmq.PUB)}
        _bind(zmq, self._sockets["publish"], settings.endpoint)
        if settings.replay_endpoint is not None:
            self._sockets["replay"] = context.socket(zmq.ROUTER)
            _bind(zmq, self._sockets["replay"], settings.replay_endpoint)

    def run(self) -> None:
        """Publish what comes in, answer replay requests; until an empty message comes in."""
        poller, replay = self._zmq.Poller(), self._sockets.get("replay")
        poller.register(self._inbox, self._zmq.POLLIN)
        if replay is not None:
            poller.register(replay, self._zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll())
            if self._inbox in ready:
                payload = self._inbox.recv()
                is_open = bool(payload)
                if is_open:
                    self._publish(payload)
            if replay in ready:
                self._replay(replay)
        for socket in (self._inbox, *self._sockets.values()):
            socket.close(linger=1000)

    def _publish(self, payload: bytes) -> None:
        number = self._num_sent.to_bytes(8, "big")
        self._num_sent += 1
        self._kept.append((number, payload))
        self._sockets["publish"].send_multipart((self._topic, number, payload))

    def _replay(self, socket: Any) -> None:
        """Answer one request; anything that is no request is ignored."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart((client, b"", number, payload))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))


def _bind(zmq: ModuleType, socket: Any, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"KV events: cannot bind {endpoint}: {error}") from error


def _libraries() -> tuple[ModuleType, ModuleType]:
    """ZeroMQ and msgpack, which only those who want events install."""
    try:
        import msgspec.msgpack
        import zmq
    except ImportError as error:
        raise ConfigError(
            f"KV events need {error.name}, which is not installed: pip install 'quire[events]', "
            "or leave out --kv-events-endpoint"
        ) from error
    return zmq, msgspec.msgpack
