"""The whole server over a model that computes nothing: what a streamed token costs is the server's own work.

    python -m bench.noop_server --port 8123

Put together by `server.build` as a real one is, with the embedded model's tokenizer and template; answers go through
a prose text token by token. `/ready` tells when it listens.
"""

import argparse
import asyncio
import gc
import os
import sys
from importlib.metadata import version
from typing import cast

import uvicorn

from bench.noop import BLOCK_SIZE, MAX_MODEL_LEN, NoOpEngine
from bench.workloads import TEXT
from engine.config import EngineConfig
from engine.engine import Engine
from engine.weights.checkpoint import resolve_model
from engine.weights.gguf_header import read_gguf_header
from server.app import create_app
from server.build import Loaded, assemble
from server.config import ServerConfig
from server.limits import KeyRing
from server.metrics import Metrics
from server.serve import bind
from server.state import ServerState
from server.text.template import ChatTemplate
from server.text.tokenizer import Tokenizer

MAX_NUM_SEQS = 256


def load() -> Loaded:
    """A tokenizer and an engine that says the text's tokens."""
    source = resolve_model(None)
    tokenizer = Tokenizer.from_gguf(read_gguf_header(source.path).metadata)
    script = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)
    num_blocks = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE
    engine = NoOpEngine(script, num_blocks, tokenizer.vocab_size, hops=True)
    template = tokenizer.chat_template
    return Loaded(
        source=source,
        engine=cast(Engine, engine),
        engine_config=EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192),
        tokenizer=tokenizer,
        template=ChatTemplate(template, tokenizer) if template else None,
        generation={},
        stop_token_ids=frozenset({tokenizer.eos_token_id or 0}),
    )


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    config = ServerConfig(port=port, max_num_seqs=MAX_NUM_SEQS)
    metrics = Metrics(version=version("quire"))
    state = ServerState(config, metrics, KeyRing())
    served = assemble(load(), config, metrics)
    state.set_ready(served)
    running = asyncio.create_task(served.scheduler.run())
    gc.collect()
    gc.freeze()
    app = create_app(state)
    http = uvicorn.Server(uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False))
    await http.serve(sockets=[bind(config.host, port)])
    served.scheduler.stop()
    await running


def main() -> int:
    """Pin to one core where asked, and serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.noop_server", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--core", type=int, help="the only core this process may use")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(args.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
