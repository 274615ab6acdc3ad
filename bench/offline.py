"""The offline API as a process that answers loads: one JSON line in, one out. Started by `bench.targets.offline`.

{}                                                    -> what `describe` says, once the model is loaded
{"batch": N, "questions": [{"prompt", "max_tokens"}]} -> {"wall_s": ..., "lengths": [[in, out], ...]}
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from server.config import read_config
from server.errors import ApiError
from server.llm import LLM


def answer(llm: LLM, command: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the questions in batches, and time them all together."""
    with_tokens = bool(command.get("with_tokens"))
    common = {"temperature": 0, "ignore_eos": True, "return_token_ids": with_tokens}
    bodies = [common | question for question in command["questions"]]
    size = command["batch"]
    answers: list[Mapping[str, Any]] = []
    began_s = time.perf_counter()
    for start in range(0, len(bodies), size):
        for body in llm.answers(bodies[start : start + size]):
            if isinstance(body, ApiError):
                raise SystemExit(f"a question was refused: {body.message}")
            answers.append(body)
    wall_s = time.perf_counter() - began_s
    lengths = [[body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]] for body in answers]
    token_ids = [body["choices"][0]["token_ids"] for body in answers] if with_tokens else []
    return {"wall_s": wall_s, "lengths": lengths, "token_ids": token_ids}


def describe(llm: LLM) -> dict[str, Any]:
    """The fields of `bench.targets.Served`."""
    info = llm.info
    return {
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes,
        "kv_bytes_per_token": info.layout.bytes_per_token,
    }


def main(argv: Sequence[str]) -> int:
    """Load the model that these flags of `quire serve` describe, and answer lines until there are no more."""
    config = read_config(argv)
    with LLM(config=config, progress=False) as llm:
        for line in sys.stdin:
            command = json.loads(line)
            reply = answer(llm, command) if command else describe(llm)
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
