"""Which tool-call dialects there are, and which one a chat template speaks."""

from collections.abc import Callable

from server.text.tools.default import DefaultDialect
from server.text.tools.dialect import ToolDialect
from server.text.tools.hermes import HermesDialect
from server.text.tools.llama3_json import Llama3JsonDialect
from server.text.tools.mistral import MistralDialect
from server.text.tools.pythonic import PythonicDialect

_DIALECTS: dict[str, Callable[[], ToolDialect]] = {
    "hermes": HermesDialect,
    "llama3_json": Llama3JsonDialect,
    "mistral": MistralDialect,
    "mistral_args": lambda: MistralDialect(compact=True),
    "pythonic": PythonicDialect,
    "default": DefaultDialect,
}


def dialect_names() -> tuple[str, ...]:
    """The names that may be asked for, besides `auto`."""
    return tuple(_DIALECTS)


def select_dialect(name: str, chat_template: str | None) -> ToolDialect:
    """The dialect of this name; `auto` asks the chat template.

    Raises:
        ValueError: no dialect has this name.
    """
    chosen = detect_dialect(chat_template) if name == "auto" else name
    if chosen not in _DIALECTS:
        raise ValueError(f"unknown tool-call parser {name!r}; known are auto, {', '.join(_DIALECTS)}")
    return _DIALECTS[chosen]()


def detect_dialect(chat_template: str | None) -> str:
    """The name of the dialect whose spelling the template shows; `default` for a template without tools."""
    template = chat_template or ""
    if "tools" not in template:
        return "default"
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[func_name1(" in template or "[func_name(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return "default"
