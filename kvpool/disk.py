"""The disk tier: one file a block, found again after a restart.

    DIR/<fingerprint, 16 hex digits>/<digest, 64 hex digits>.kv          one folder per model, dtype and layout

    +------+---------+-------------+--------+----------+--------------+
    | QKV1 | payload | fingerprint | digest | checksum | payload ...  |      sizes 4, 8, 32, 32, 32 bytes, then the rest
    +------+---------+-------------+--------+----------+--------------+
             length     sha-256       sha-256  blake2b of all that is before it and of the payload

A file is written beside its place and renamed into it, so a killed process leaves a whole file or a temporary one,
which the next start removes. Whatever is not exactly what its name says is not used, is reported and is removed.
Knows files and bytes; knows no tensors. The books belong to one thread; a reader and a writer thread touch files only.
"""

import hashlib
import logging
import os
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvpool.tier import LruBytes, TierStats, completed, leading

logger = logging.getLogger(__name__)

MAGIC = b"QKV1"
_FIELDS = struct.Struct("<4sQ32s32s")
_CHECKSUM_BYTES = 32
_HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
MAX_BACKLOG_BYTES = 256 << 20
"""Bytes that may wait to be written; while there are more, evicted blocks are not kept."""

MAX_NAMED = 5
"""Foreign files that a warning names."""


class BadBlock(ValueError):
    """A file that does not hold the block its name says; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class BlockFiles:
    """The files of one model's blocks: reading, writing and checking them, without any state.

    Attributes:
        folder: of this fingerprint alone.
        fingerprint: 32 bytes that name everything which makes blocks comparable (model, dtype, layout).
        block_bytes: payload of every block.
    """

    folder: Path
    fingerprint: bytes
    block_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of a whole file."""
        return _HEADER_BYTES + self.block_bytes

    def path(self, digest: bytes) -> Path:
        """Where a block's file is."""
        return self.folder / f"{digest.hex()}.kv"

    def write(self, digest: bytes, data: bytes) -> None:
        """Write a whole file, then give it its name. Raises OSError."""
        path = self.path(digest)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(self._header(digest, data))
                file.write(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, digest: bytes) -> bytes:
        """A block's payload, checked.

        Raises:
            BadBlock: the file is cut, damaged, or of another block, model or layout.
            OSError: it cannot be read.
        """
        content = self.path(digest).read_bytes()
        if len(content) != self.file_bytes:
            raise BadBlock(f"it has {len(content)} bytes instead of {self.file_bytes}")
        header, data = content[:_HEADER_BYTES], content[_HEADER_BYTES:]
        if header != self._header(digest, data):
            raise BadBlock(_difference(header, self._header(digest, data)))
        os.utime(self.path(digest))  # used last, also for the next start
        return data

    def scan(self) -> list[bytes]:
        """Digests of all files, the one unused for longest first; unfinished ones are removed. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found: list[tuple[float, bytes]] = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(".tmp"):
                Path(entry).unlink(missing_ok=True)
            elif (digest := _digest_of(entry.name)) is not None:
                found.append((entry.stat().st_mtime, digest))
        return [digest for _, digest in sorted(found)]

    def remove(self, digest: bytes) -> None:
        """Remove a block's file, if it is there and can be removed."""
        try:
            self.path(digest).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("KV disk tier: %s cannot be removed: %s", self.path(digest), error)

    def _header(self, digest: bytes, data: bytes) -> bytes:
        fields = _FIELDS.pack(MAGIC, len(data), self.fingerprint, digest)
        checksum = hashlib.blake2b(fields, digest_size=_CHECKSUM_BYTES)
        checksum.update(data)
        return fields + checksum.digest()


class DiskTier:
    """Blocks in files under one folder, within `max_bytes`, least recently used out first."""

    is_durable = True

    def __init__(self, files: BlockFiles, max_bytes: int) -> None:
        """Find what earlier runs left. Raises OSError when the folder cannot be used."""
        self._files = files
        self._books = LruBytes(max_bytes)
        self._unwritten: dict[bytes, bytes] = {}
        self._writing: deque[tuple[bytes, Future[None]]] = deque()
        self._reading: deque[tuple[list[bytes], Future[list[bytes]]]] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self._num_stored = self._num_loaded = self._num_failed = 0
        self._is_closed = False
        for digest in files.scan():
            self._take_in(digest)
        _report_others(files.folder)

    @property
    def is_accepting(self) -> bool:
        """Whether there is room behind the writer."""
        self._reap()
        return not self._is_closed and len(self._unwritten) * self._files.block_bytes < MAX_BACKLOG_BYTES

    def holds(self, digest: bytes) -> bool:
        """Whether its file is there, or about to be."""
        self._reap()
        return digest in self._books

    def wants(self, digest: bytes) -> bool:
        """Whatever is not there, unless the disk is behind."""
        return digest not in self._books and self.is_accepting

    def store(self, digest: bytes, data: bytes) -> None:
        """Have the writer write it. It can be fetched at once."""
        if not self.wants(digest) or self._files.file_bytes > self._books.max_bytes:
            return
        self._unwritten[digest] = data
        self._writing.append((digest, self._writer.submit(self._files.write, digest, data)))
        self._take_in(digest)

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        """Have the reader read the leading ones that are there."""
        self._reap()
        wanted = leading(digests, self.holds)
        if not wanted or self._is_closed:
            return completed([])
        self._books.touch(wanted)
        in_memory = {digest: self._unwritten[digest] for digest in wanted if digest in self._unwritten}
        future = self._reader.submit(_read_all, self._files, wanted, in_memory)
        self._reading.append((wanted, future))
        return future

    def stats(self) -> tuple[TierStats, ...]:
        """A snapshot."""
        self._reap()
        books = self._books
        counts = (self._num_stored, self._num_loaded, self._num_failed)
        return (TierStats("disk", len(books), books.num_bytes, books.max_bytes, *counts),)

    def close(self) -> None:
        """Finish writing, then end both threads."""
        self._is_closed = True
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True)
        self._reap()

    def _take_in(self, digest: bytes) -> None:
        for dropped in self._books.add(digest, self._files.file_bytes):
            self._writer.submit(self._files.remove, dropped)

    def _reap(self) -> None:
        """Enter what the threads have finished into the books. Each works in order, so only heads are looked at."""
        while self._writing and self._writing[0][1].done():
            digest, written = self._writing.popleft()
            self._unwritten.pop(digest, None)
            error = written.exception()
            if error is None:
                self._num_stored += 1
            else:
                self._lose(digest, f"cannot be written: {error}")
        while self._reading and self._reading[0][1].done():
            wanted, read = self._reading.popleft()
            num_read = len(read.result()) if read.exception() is None else 0
            self._num_loaded += num_read
            if num_read < len(wanted) and wanted[num_read] in self._books:
                self._num_failed += 1
                self._books.remove(wanted[num_read])

    def _lose(self, digest: bytes, why: str) -> None:
        logger.warning("KV disk tier: %s %s", self._files.path(digest), why)
        self._num_failed += 1
        self._books.remove(digest)


def _read_all(files: BlockFiles, digests: Sequence[bytes], in_memory: Mapping[bytes, bytes]) -> list[bytes]:
    """On the reader's thread: payloads up to the first that is not right, which is reported and removed."""
    blocks: list[bytes] = []
    for digest in digests:
        try:
            blocks.append(in_memory[digest] if digest in in_memory else files.read(digest))
        except FileNotFoundError:
            break  # another server that shares the folder needed the room
        except (BadBlock, OSError) as error:
            logger.warning("KV disk tier: %s is ignored: %s", files.path(digest), error)
            files.remove(digest)
            break
    return blocks


def _difference(found: bytes, expected: bytes) -> str:
    """Which field of a header is wrong, in the order in which they are worth naming."""
    magic, num_bytes, fingerprint, digest = _FIELDS.unpack(found[: _FIELDS.size])
    wanted = _FIELDS.unpack(expected[: _FIELDS.size])
    names = ("it is no KV block file", "its length is wrong", "it is of another model or layout", "it is another block")
    pairs = zip((magic, num_bytes, fingerprint, digest), wanted, names, strict=True)
    return next((name for value, want, name in pairs if value != want), "its checksum is wrong")


def _digest_of(file_name: str) -> bytes | None:
    stem, _, suffix = file_name.partition(".")
    try:
        return bytes.fromhex(stem) if suffix == "kv" and len(stem) == 64 else None
    except ValueError:
        return None


def _report_others(folder: Path) -> None:
    """Warn of what takes room and is of no use here: blocks of other models or layouts, files that are no blocks."""
    entries = [entry for entry in folder.parent.iterdir() if entry.name != folder.name]
    others = [entry for entry in entries if entry.is_dir()]
    num_bytes = sum(file.stat().st_size for other in others for file in other.glob("*.kv"))
    if num_bytes:
        logger.warning(
            "KV disk tier: %s holds %d bytes of other models or layouts, which are ignored: %s",
            *(folder.parent, num_bytes, ", ".join(sorted(other.name for other in others))),
        )
    foreign = sorted(entry.name for entry in entries if not entry.is_dir())
    if foreign:
        names = ", ".join(foreign[:MAX_NAMED]) + (", ..." if len(foreign) > MAX_NAMED else "")
        logger.warning("KV disk tier: %s holds %d files that are no KV blocks: %s", folder.parent, len(foreign), names)


def disk_tier(root: Path, fingerprint: bytes, block_bytes: int, max_bytes: int) -> DiskTier:
    """The tier under `root` for blocks of one fingerprint (32 bytes). Raises OSError when it cannot be used."""
    return DiskTier(BlockFiles(root / fingerprint.hex()[:16], fingerprint, block_bytes), max_bytes)
