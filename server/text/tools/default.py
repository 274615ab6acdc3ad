"""For chat templates that know no tools (SmolLM2's, for one): tools and their results written into ordinary messages.

Tools go into the system message, earlier calls into assistant content, results into user turns, all in Hermes form.
Messages are neither merged nor reordered; a system message is added only where there is none to write the tools into.
"""

import json
from collections.abc import Sequence

from server.text.tools.dialect import Message, Tool
from server.text.tools.hermes import CLOSE, OPEN, HermesDialect
from server.text.tools.messages import arguments_object, calls_of, text_of

_INTRODUCTION = """You can call functions to help with the user's request. The functions are, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object of its name and arguments between tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


class DefaultDialect(HermesDialect):
    """Hermes calls, with a prompt of its own."""

    name = "default"
    needs_prompt = True
    shows_special_tokens = False

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Messages with only `role` and `content`, in which tools, calls and results are text."""
        rendered = [_plain(message) for message in messages]
        if not tools:
            return rendered
        lines = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=lines)
        if rendered and rendered[0]["role"] == "system":
            system = rendered[0]
            return [system | {"content": f"{text_of(system['content'])}\n\n{introduction}"}, *rendered[1:]]
        return [{"role": "system", "content": introduction}, *rendered]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"}
    if message.get("tool_calls"):
        parts = [text_of(message.get("content")), *map(_written, calls_of(message))]
        return {"role": message["role"], "content": "\n".join(part for part in parts if part)}
    return dict(message)


def _written(function: dict[str, object]) -> str:
    call = {"name": function["name"], "arguments": arguments_object(function.get("arguments"))}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
