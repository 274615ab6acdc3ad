"""API keys and what each may use: requests and tokens per minute, and requests at once.

Knows keys (only their SHA-256), names and buckets; refuses to know routes and bodies. One account per key, changed on
the event loop only.

A key file is YAML or JSON: a list of keys, or of entries

    - name: batch-jobs                # shown in metrics; `key-N` without one
      key: sk-...                     # or sha256: the key's digest in hex
      requests_per_minute: 600
      tokens_per_minute: 100000       # prompt and output
      max_concurrent_requests: 8

A plain file with one key a line (`#` begins a comment) is fine too.
"""

import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from server.errors import ApiError, Busy
from server.flags import ConfigError

WINDOW_S = 60.0
RECENT = 0.2  # how much the latest request's duration counts in the mean
_LIMIT_FIELDS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
_ENTRY_FIELDS = {"name", "key", "sha256", *_LIMIT_FIELDS}


class KeyFileError(ConfigError):
    """The key file can't be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One API key: its digest, its name for metrics, and its limits (None: no limit)."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class Bucket:
    """A token bucket: holds up to `per_minute` units and refills evenly. May be overdrawn by work already done."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """Units left now; negative after an overdraft."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_s) * self.per_minute / WINDOW_S)
        self._filled_s = now
        return self._level

    def take(self, amount: float) -> None:
        """Use `amount` units, whatever is left."""
        self._level = self.level - amount

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` units are there."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * WINDOW_S / self.per_minute)

    def headers(self, what: str) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*` headers for this bucket."""
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(0, math.floor(self.level))),
            f"x-ratelimit-reset-{what}": f"{self.wait_s(self.per_minute):.3f}s",
        }


class Account:
    """One key's use of the server. The account without a key has no limits and the name ""."""

    def __init__(self, entry: KeyEntry, clock: Callable[[], float]) -> None:
        self.entry = entry
        self.num_running = 0
        self._clock = clock
        self._mean_s = 0.0  # of its latest requests, from admission to end
        self._requests = Bucket(entry.requests_per_minute, clock) if entry.requests_per_minute else None
        self._tokens = Bucket(entry.tokens_per_minute, clock) if entry.tokens_per_minute else None

    @property
    def name(self) -> str:
        """The label for metrics."""
        return self.entry.name

    def admit(self) -> "Lease":
        """Let one more request in.

        Raises:
            ApiError: 429 that says which limit is used up and when to come back.
        """
        limit = self.entry.max_concurrent_requests
        if limit is not None and self.num_running >= limit:
            # With `limit` of them always under way, one ends every so often.
            raise self._refuse("concurrent_requests", self.num_running, limit, self._mean_s / limit)
        if self._requests is not None and self._requests.level < 1:
            bucket = self._requests
            raise self._refuse("requests_per_minute", bucket.per_minute, bucket.per_minute, bucket.wait_s(1))
        if self._tokens is not None and self._tokens.level < 1:
            self._refuse_tokens(1)
        if self._requests is not None:
            self._requests.take(1)
        self.num_running += 1
        return Lease(self, self._clock())

    def leave(self, admitted_s: float) -> None:
        """A request let in at `admitted_s` has ended."""
        self.num_running -= 1
        took_s = self._clock() - admitted_s
        self._mean_s += (took_s - self._mean_s) * (RECENT if self._mean_s else 1)

    def charge(self, num_tokens: int, *, check: bool) -> None:
        """Take `num_tokens` from the minute's tokens; with `check`, refuse (429) when they aren't there."""
        if self._tokens is None:
            return
        if check and self._tokens.level < min(num_tokens, self._tokens.per_minute):
            self._refuse_tokens(num_tokens)
        self._tokens.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` for the limits this key has."""
        headers = self._requests.headers("requests") if self._requests else {}
        return headers | (self._tokens.headers("tokens") if self._tokens else {})

    def _refuse_tokens(self, num_tokens: int) -> None:
        assert self._tokens is not None
        used = self._tokens.per_minute - max(0, math.floor(self._tokens.level))
        raise self._refuse("tokens_per_minute", used, self._tokens.per_minute, self._tokens.wait_s(num_tokens))

    def _refuse(self, reason: str, used: int, limit: int, wait_s: float) -> ApiError:
        busy = Busy(reason, used, limit, wait_s)
        message = (
            f"Rate limit of this API key reached: {reason.replace('_', ' ')}, {used} of {limit} used; "
            f"retry in {busy.clamped_s:.1f} s."
        )
        return ApiError(429, message, code="rate_limit_exceeded", busy=busy, headers=self.headers())


class Lease:
    """One admitted request; closed exactly once, however it ends."""

    def __init__(self, account: Account, admitted_s: float) -> None:
        self.account = account
        self._admitted_s = admitted_s
        self._open = True

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge the prompt before it is queued.

        Raises:
            ApiError: 429 when this minute has no tokens left for it.
        """
        self.account.charge(num_tokens, check=True)

    def close(self, num_output_tokens: int = 0) -> None:
        """The request ended after `num_output_tokens`; harmless when closed before."""
        if self._open:
            self._open = False
            self.account.leave(self._admitted_s)
            self.account.charge(num_output_tokens, check=False)


class KeyRing:
    """All keys of this server. Without keys everyone is the unlimited account ""."""

    def __init__(self, entries: Sequence[KeyEntry] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._accounts = [Account(entry, clock) for entry in entries]
        self.anonymous = Account(KeyEntry("", b""), clock)

    @classmethod
    def load(cls, keys: Sequence[str] = (), path: str | Path | None = None) -> "KeyRing":
        """The keys given one by one, and those of the key file.

        Raises:
            KeyFileError: the file can't be read, says something unknown, or holds no key.
        """
        entries = [_entry(key, index, "") for index, key in enumerate(keys, 1)]
        if path is not None:
            entries += _read_file(Path(path), len(entries))
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names):
            raise KeyFileError("API keys must have distinct names")
        return cls(entries)

    @property
    def asks_for_keys(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._accounts)

    def find(self, key: str) -> Account | None:
        """The account of `key`; takes the same time for any wrong key."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for account in self._accounts:
            if hmac.compare_digest(account.entry.digest, digest):
                found = account
        return found


def _read_file(path: Path, num_before: int) -> list[KeyEntry]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read the key file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise KeyFileError(f"the key file {path} is neither YAML, JSON nor one key a line") from error
    if isinstance(content, str):
        content = content.split()
    if not isinstance(content, list) or not content:
        raise KeyFileError(f"the key file {path} must be a list of keys with at least one")
    return [_entry(item, num_before + index, f" in {path}") for index, item in enumerate(content, 1)]


def _entry(item: Any, number: int, where: str) -> KeyEntry:
    if isinstance(item, str | int):
        item = {"key": str(item)}
    if not isinstance(item, dict) or set(item) - _ENTRY_FIELDS:
        raise KeyFileError(f"key {number}{where} must be a key or have only {', '.join(sorted(_ENTRY_FIELDS))}")
    if ("key" in item) == ("sha256" in item):
        raise KeyFileError(f"key {number}{where} must have either key or sha256")
    for name in _LIMIT_FIELDS:
        value = item.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise KeyFileError(f"key {number}{where}: {name} must be a whole number of at least 1")
    limits = {name: item.get(name) for name in _LIMIT_FIELDS}
    return KeyEntry(str(item.get("name") or f"key-{number}"), _digest(item, number, where), **limits)


def _digest(item: dict[str, Any], number: int, where: str) -> bytes:
    if "sha256" in item:
        text = str(item["sha256"]).lower()
        if not re.fullmatch(r"[0-9a-f]{64}", text):
            raise KeyFileError(f"key {number}{where}: sha256 must be 64 hexadecimal digits")
        return bytes.fromhex(text)
    key = str(item["key"])
    if not key:
        raise KeyFileError(f"key {number}{where} is empty")
    return hashlib.sha256(key.encode()).digest()
