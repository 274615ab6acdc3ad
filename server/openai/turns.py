"""A prompt made of text, with the very tokens of the replies that stand in it: see `server.text.replies`.

Knows bodies and the served model's memory of replies; knows nothing of how prompts are rendered.
"""

import asyncio
from functools import partial

from server.openai.schema.common import CommonFields
from server.openai.translate import Prompt, cache_namespace
from server.state import Served
from server.text.replies import spell

THREAD_TOKENS = 8_000
"""Longer prompts are spelled off the event loop."""


async def with_replies(prompt: Prompt, body: CommonFields, served: Served) -> Prompt:
    """The same text in the tokens that hit the prefix cache. A text that is to be scored keeps its own spelling."""
    if served.replies is None or body.prompt_logprobs is not None or body.echo:
        return prompt
    work = partial(spell, served.tokenizer, cache_namespace(body, served), prompt.token_ids)
    spelled = await asyncio.to_thread(work) if len(prompt.token_ids) > THREAD_TOKENS else work()
    recalled = served.replies.recall(spelled)
    return Prompt(recalled.token_ids, prompt.text, recalled.site)
