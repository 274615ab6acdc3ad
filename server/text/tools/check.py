"""Whether tools can be what they say: each one's `parameters` must be a valid JSON Schema of an object.

So much is checked of every tool, also when none may be called: what the prompt shows the model would be nonsense else.
Whether a schema can be *enforced* is another question, asked by the grammar's compiler when a grammar is made of it
(a forced call, a strict tool): in free text nothing holds the arguments to any keyword, so none is refused.

Knows: JSON Schema's own rules, through `json_schema`. Refuses to know: grammars, HTTP.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from server.text.grammar_spec import GrammarError, schema_text
from server.text.json_schema import SchemaError, check_valid
from server.text.tools.dialect import Tool

MAX_BYTES = 1 << 20
"""Of the schemas of one request that were not seen before, as JSON: checking takes seconds for so much."""


class ToolCheck:
    """Checks tools off the event loop, and remembers what was found valid: clients send the same ones again."""

    def __init__(self, max_remembered: int = 1024) -> None:
        self._max_remembered = max_remembered
        self._valid: OrderedDict[bytes, None] = OrderedDict()  # digests of schemas

    async def check(self, tools: Sequence[Tool]) -> None:
        """Let valid tools pass.

        Raises:
            GrammarError: naming the tool, the keyword and its path.
        """
        texts = [schema_text(tool.parameters, tool.path).encode() for tool in tools]
        digests = [hashlib.blake2b(text, digest_size=16).digest() for text in texts]
        unseen = [i for i, digest in enumerate(digests) if digest not in self._valid]
        if sum(len(texts[i]) for i in unseen) > MAX_BYTES:
            raise GrammarError(f"the schemas of the tools are larger than {MAX_BYTES} bytes", "tools")
        if unseen:
            await asyncio.to_thread(_check_all, [tools[i] for i in unseen])
        self._remember(digests)

    def _remember(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._valid[digest] = None
            self._valid.move_to_end(digest)
        while len(self._valid) > self._max_remembered:
            self._valid.popitem(last=False)


def _check_all(tools: Sequence[Tool]) -> None:
    for tool in tools:
        try:
            check_valid(tool.parameters)
        except SchemaError as error:
            raise GrammarError(f"tool {tool.name!r}: {error}", tool.path, error.path or None) from None
        if tool.parameters.get("type", "object") != "object":
            message = f"tool {tool.name!r}: the parameters of a tool must have type 'object' (at type)"
            raise GrammarError(message, tool.path, "type")
