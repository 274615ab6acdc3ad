"""Replies as the model wrote them, token by token, for the next turn of the conversation.

A client sends text back. Encoding it anew can give other tokens than the model drew (any text has many spellings), and
then nothing behind the first difference is found in the prefix cache. So the tokens of each reply are kept, and a later
prompt whose text goes through the same reply takes them over:

    turn 1    <|user|> Hi <|assistant|> He llo !! <|end|>            drawn: three tokens
    turn 2    <|user|> Hi <|assistant|> Hello ! ! <|end|> ...        encoded: three others
    becomes   <|user|> Hi <|assistant|> He llo !! <|end|> ...

What is taken over spells the same bytes, from a control token (which no tokenizer joins with its neighbours) to the
last place where both spellings have a token's end; control tokens equal only themselves. Templates that cut or reword
a reply lose nothing but the part behind the cut.

Knows a vocabulary's bytes, namespaces and token ids; knows no messages, templates or blocks. `spell` may run in any
thread; a `ReplyMemory` belongs to one.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from server.text.tokenizer import Tokenizer

MAX_OPENER_TOKENS = 64
"""Tokens from the last control token to the prompt's end. A prompt with a longer tail opens no turn of a chat."""

MAX_REPLIES_PER_SITE = 8
ENTRY_BYTES = 256
"""Of a reply, besides its tokens."""


@dataclass(frozen=True, slots=True)
class ReplySite:
    """Where a reply will stand: `key` names everything before the control token that `opener_ids` begin with."""

    key: bytes
    opener_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpelledPrompt:
    """A prompt's tokens, and its control tokens: the index of each, with the key of what stands before it."""

    token_ids: Sequence[int]
    sites: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class RecalledPrompt:
    """A prompt's tokens, those of earlier replies taken over, and where its own reply will stand.

    `site` is None when no control token is near the end.
    """

    token_ids: tuple[int, ...]
    site: ReplySite | None


def spell(tokenizer: Tokenizer, namespace: bytes, token_ids: Sequence[int]) -> SpelledPrompt:
    """Find the control tokens of a prompt, and name what stands before each: namespace, bytes, control tokens."""
    digest = hashlib.sha256(namespace)
    added_ids = tokenizer.added_ids
    sites = []
    run: list[bytes] = []
    for index, token_id in enumerate(token_ids):
        if token_id not in added_ids:
            run.append(tokenizer.token_bytes(token_id))
            continue
        text = b"".join(run)
        digest.update(len(text).to_bytes(8, "little") + text)
        sites.append((index, digest.digest()))
        digest.update(token_id.to_bytes(8, "little"))
        run.clear()
    return SpelledPrompt(token_ids, tuple(sites))


class ReplyMemory:
    """The latest replies, up to `max_bytes`; the least recently used are forgotten first."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self.num_bytes = 0
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._replies: OrderedDict[bytes, list[array[int]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._replies.values()))

    def remember(self, site: ReplySite, token_ids: Sequence[int]) -> None:
        """Keep a reply, a stop token included: also one that was cut off, as the client may send back what it got.

        Replies of vocabularies that do not spell bytes are not kept: one could not tell when two are equal.
        """
        if not token_ids or not self._tokenizer.is_bytewise:
            return
        reply = array("i", (*site.opener_ids, *token_ids))
        replies = self._replies.setdefault(site.key, [])
        self._replies.move_to_end(site.key)
        if reply in replies:
            replies.remove(reply)
        else:
            self.num_bytes += _size_of(reply)
        replies.insert(0, reply)
        if len(replies) > MAX_REPLIES_PER_SITE:
            self.num_bytes -= _size_of(replies.pop())
        self._shrink()

    def recall(self, prompt: SpelledPrompt) -> RecalledPrompt:
        """Take over the tokens of the replies that stand in a prompt. What it spells stays the same."""
        token_ids, taken, index = prompt.token_ids, list[int](), 0
        for site, key in prompt.sites if self._replies else ():
            if site < index or key not in self._replies:
                continue
            self._replies.move_to_end(key)
            spans = [(*self._shared(reply, token_ids, site), reply) for reply in self._replies[key]]
            num_read, num_written, reply = max(spans, key=lambda span: span[0])  # of equals the latest
            taken += token_ids[index:site]
            taken += reply[:num_written]
            index = site + num_read
        taken += token_ids[index:]
        return RecalledPrompt(tuple(taken), self._site_of(prompt, taken))

    def _site_of(self, prompt: SpelledPrompt, token_ids: Sequence[int]) -> ReplySite | None:
        """The last control token: it is the same one in the prompt as it was, and as it is with `token_ids`."""
        for length in range(1, min(MAX_OPENER_TOKENS, len(token_ids)) + 1):
            if token_ids[-length] in self._tokenizer.added_ids:
                return ReplySite(prompt.sites[-1][1], tuple(token_ids[-length:]))
        return None

    def _shared(self, reply: Sequence[int], token_ids: Sequence[int], site: int) -> tuple[int, int]:
        """How many tokens from `site` on, and of the reply, spell the same bytes: up to the last end they share."""
        spelling, added_ids = self._tokenizer.token_bytes, self._tokenizer.added_ids
        shared = 0, 0
        read, written = site, 0
        left = right = b""  # of the prompt's current token, and the reply's: what the other side has not matched
        while True:
            if not left and not right:
                while read < len(token_ids) and written < len(reply) and token_ids[read] == reply[written]:
                    read, written = read + 1, written + 1
                shared = read - site, written
            if not left:
                if read == len(token_ids) or token_ids[read] in added_ids:
                    return shared
                left, read = spelling(token_ids[read]), read + 1
            if not right:
                if written == len(reply) or reply[written] in added_ids:
                    return shared
                right, written = spelling(reply[written]), written + 1
            size = min(len(left), len(right))
            if not size or left[:size] != right[:size]:
                return shared
            left, right = left[size:], right[size:]

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes:
            _, replies = self._replies.popitem(last=False)
            self.num_bytes -= sum(map(_size_of, replies))


def _size_of(reply: "array[int]") -> int:
    return ENTRY_BYTES + reply.itemsize * len(reply)
