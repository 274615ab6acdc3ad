"""The `quire` command: finds the subcommand and hands over. Imports nothing heavy, so that help is instant."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

USAGE = """usage: quire COMMAND ...

commands:
  serve [MODEL]   serve a model over the OpenAI HTTP API
  chat            talk to a running server, or to one started for the occasion
  generate        answer a JSONL file of prompts, offline
  plan [MODEL]    what fits a memory: tokens, contexts, users
  version         print the version

`quire COMMAND --help` explains each.
"""

_COMMANDS = {"serve": "server.serve", "chat": "server.chat_cli", "generate": "server.generate", "plan": "server.plan"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire ARGV`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else ""
    if command in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if command in ("version", "--version", "-V"):
        sys.stdout.write(version("quire") + "\n")
        return 0
    if command not in _COMMANDS:
        sys.stderr.write(f"quire: unknown command {command!r}\n\n{USAGE}" if command else USAGE)
        return 2
    status: int = import_module(_COMMANDS[command]).main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
