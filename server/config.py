"""Every setting of `quire serve`, once: its flag, `QUIRE_...` variable, YAML key, default, range and help text.

Knows what may be set and what goes together. Refuses to know how settings are read (`server.flags`) and what they
cause (`server.build`). A `ServerConfig` is read once at the start and never written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.config import ATTENTION_BACKENDS, QUANTIZATIONS
from engine.sampling.params import MAX_LOGPROBS, SAMPLER_ORDER, check_sampler_order
from kvpool.layout import KV_CACHE_DTYPES
from server.flags import (
    ConfigError,
    build_parser,
    choice,
    environment,
    flag,
    integer,
    nonempty,
    number,
    read_settings,
    size,
    some_bytes,
)

DESCRIPTION = (
    "Serve a language model over the OpenAI HTTP API. Every setting is also an environment variable "
    "(QUIRE_MAX_NUM_SEQS for --max-num-seqs) and a key of the --config file; flags win over variables, variables "
    "over the file."
)


def sampler_order(text: str) -> tuple[str, ...]:
    """Comma-separated names of all sampler stages, `mask` first."""
    order = tuple(part.strip() for part in text.split(","))
    try:
        return check_sampler_order(order)
    except ValueError as error:
        raise ValueError(f"all of {','.join(SAMPLER_ORDER)}, mask first") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Frozen settings of one server. `None` means "decided at load" (from the device, the model or free memory)."""

    model: str | None = flag(
        None,
        "folder with safetensors, a .gguf file, or a hub id; without it the embedded SmolLM2-135M-Instruct is served",
        metavar="MODEL",
        positional=True,
    )
    host: str = flag("127.0.0.1", "address to listen on (127.0.0.1)", metavar="ADDRESS")
    port: int = flag(8000, "port to listen on; 0 takes a free one (8000)", integer(0, 65535), metavar="N")
    served_model_name: tuple[str, ...] = flag(
        (), "name(s) clients use for the model (the model's own)", nonempty, metavar="NAME", repeat=True
    )
    api_key: tuple[str, ...] = flag(
        (), "key that /v1 routes ask for; repeatable (none)", nonempty, metavar="KEY", repeat=True, secret=True
    )
    api_key_file: str | None = flag(None, "file of keys: one a line, or YAML with names and limits", metavar="FILE")

    device: str = flag("auto", "auto, cpu, cuda, cuda:N, mps, ... (auto)", metavar="NAME")
    dtype: str = flag(
        "auto",
        "of weights and KV cache (and of arithmetic, which is float32 on a CPU): auto, bfloat16, float16 or float32; "
        "auto is float32 on a CPU, else the checkpoint's own where the hardware computes it well",
        choice("auto", "bfloat16", "float16", "float32", half="float16", float="float32"),
        metavar="NAME",
    )
    quantization: str = flag(
        "auto",
        "of weights: auto keeps what the file holds; none widens it; int8 and int4 round at load in groups of 32, "
        "int4_g128 in groups of 128 (auto)",
        choice(*QUANTIZATIONS),
        metavar="NAME",
    )
    max_model_len: int | None = flag(None, "prompt plus output tokens (the model's)", integer(1), metavar="N")
    max_num_seqs: int | None = flag(
        None, "sequences that run at once (256 on an accelerator, 32 on a CPU)", integer(1), metavar="N"
    )
    max_num_batched_tokens: int | None = flag(
        None, "token budget of one step (8192 on an accelerator, 512 on a CPU)", integer(1), metavar="N"
    )
    max_num_queued_reqs: int = flag(1024, "requests that may wait (1024)", integer(0), metavar="N")
    max_num_queued_tokens: int | None = flag(None, "prompt tokens that may wait (no bound)", integer(1), metavar="N")
    block_size: int = flag(16, "tokens in a KV block (16)", integer(1, 1024), metavar="N")
    kv_cache_memory: int | None = flag(
        None, "bytes for the KV cache, as in 2GiB (from free memory)", size, metavar="SIZE"
    )
    num_kv_blocks: int | None = flag(None, "KV blocks; overrides --kv-cache-memory", integer(1), metavar="N")
    gpu_memory_utilization: float = flag(
        0.9, "share of the accelerator's memory to use (0.9)", number(0, 1, above=True), metavar="SHARE"
    )
    kv_cache_dtype: str = flag(
        "auto",
        "auto: the model's dtype; int8 or fp8: eight bits and a scale per token and head, for twice the tokens (auto)",
        choice(*KV_CACHE_DTYPES, fp8_e4m3="fp8"),
        metavar="NAME",
    )
    enforce_eager: bool = flag(False, "launch every GPU step anew, without CUDA graphs (off)", switch=True)
    enable_prefix_caching: bool = flag(True, "reuse the KV of equal prompt beginnings (on)", switch=True)
    reply_memory: int = flag(
        32_000_000,
        "bytes for the tokens of earlier answers, so that a conversation's next turn finds all its KV; 0 is off (32MB)",
        size,
        metavar="SIZE",
    )
    prefix_pin_budget: float = flag(
        0.0,
        "share of the KV cache that prompts with a prompt_cache_key may keep under pressure, 0 to 1 (0: off)",
        number(0, 1),
        metavar="SHARE",
    )
    kv_host_memory: int | None = flag(
        None, "host memory for KV blocks that an accelerator's cache has no room for (off)", some_bytes, metavar="SIZE"
    )
    kv_disk_path: str | None = flag(
        None, "folder for KV blocks that the cache has no room for, found again after a restart (off)", metavar="DIR"
    )
    kv_disk_size: int = flag(10 << 30, "bytes that --kv-disk-path may take (10GiB)", some_bytes, metavar="SIZE")
    kv_events_endpoint: str | None = flag(
        None, "publish KV cache events for routers, as in tcp://*:5557; needs quire[events] (off)", metavar="ENDPOINT"
    )
    kv_events_replay_endpoint: str | None = flag(
        None, "answer those who missed KV cache events, as in tcp://*:5558 (off)", metavar="ENDPOINT"
    )
    kv_events_topic: str = flag("", "topic of KV cache events (empty)", metavar="TEXT")
    forecast_admission: bool = flag(
        True, "let in only what should fit together with what running requests may still generate (on)", switch=True
    )
    max_preemptions: int = flag(
        3, "a sequence that lost its KV so often comes back to stay (3)", integer(0), metavar="N"
    )
    decode_stretch: float = flag(
        1.5,
        "how many times as long streams may wait for a token while a prompt is read; 1000: no limit (1.5)",
        number(1),
        metavar="TIMES",
    )
    max_steps_in_flight: int | None = flag(
        None,
        "1: a step is planned when the one before is done; 2: already while it runs (2 on a GPU, else 1)",
        integer(1, 2),
        metavar="N",
    )
    scheduling_policy: str = flag("fcfs", "fcfs or priority (fcfs)", choice("fcfs", "priority"), metavar="NAME")
    attention_backend: str = flag(
        "auto",
        f"auto, {', '.join(ATTENTION_BACKENDS[:-1])} or {ATTENTION_BACKENDS[-1]} (auto)",
        choice("auto", *ATTENTION_BACKENDS),
        metavar="NAME",
    )

    chat_template: str | None = flag(None, "Jinja file, or the template itself, instead of the model's", metavar="FILE")
    generation_config: str = flag(
        "auto", "auto: the model's sampling defaults; none: neutral ones; or a folder or JSON file", metavar="SOURCE"
    )
    trust_request_chat_template: bool = flag(False, "let requests bring their own chat template (off)", switch=True)
    tool_call_parser: str = flag("auto", "how the model writes tool calls (auto: from its template)", metavar="NAME")
    reasoning_parser: str = flag("auto", "how the model marks reasoning (auto: from its template)", metavar="NAME")
    max_logprobs: int = flag(
        MAX_LOGPROBS, f"most alternatives a request may ask for ({MAX_LOGPROBS})", integer(0, MAX_LOGPROBS), metavar="N"
    )
    strict_params: bool = flag(False, "refuse requests with unknown or unusable fields (off: report them)", switch=True)
    sampler_order: tuple[str, ...] = flag(
        SAMPLER_ORDER, f"order of the sampler's stages ({','.join(SAMPLER_ORDER)})", sampler_order, metavar="A,B,..."
    )
    seed: int = flag(0, "where seeds of requests without one come from (0)", integer(-(2**63), 2**63 - 1), metavar="N")

    allowed_origins: tuple[str, ...] = flag(
        (), "origin that browsers may call from, or *; repeatable (none)", nonempty, metavar="ORIGIN", repeat=True
    )
    max_request_bytes: int = flag(32_000_000, "largest request body (32MB)", size, metavar="SIZE")
    queue_timeout: float | None = flag(
        None, "seconds a request may wait before it is refused (no bound)", number(0, above=True), metavar="SECONDS"
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that running requests get on SIGTERM (30)", number(0), metavar="SECONDS"
    )
    sse_keep_alive_interval: float = flag(
        15.0, "seconds of silence before a stream sends a comment (15)", number(0, above=True), metavar="SECONDS"
    )
    threads: int | None = flag(
        None, "CPU threads of the engine (the cores this process may use)", integer(1), metavar="N"
    )
    log_level: str = flag(
        "info", "debug, info, warning or error (info)", choice("debug", "info", "warning", "error"), metavar="NAME"
    )
    log_format: str = flag("text", "text or json (text)", choice("text", "json"), metavar="NAME")
    disable_vllm_metrics: bool = flag(False, "leave the vllm:* names out of /metrics (off)", switch=True)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens and self.max_num_seqs and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), so that every running sequence can take part in a step"
            )

        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigError("--kv-events-replay-endpoint has nothing to replay without --kv-events-endpoint")

    def visible(self) -> dict[str, Any]:
        """Setting name -> value of everything that is not the default, without secrets; for the log."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.repr and getattr(self, field.name) != field.default
        }


def read_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """The settings of `quire serve ARGV`.

    Raises:
        ConfigError: a value that cannot be used, in one line.
        SystemExit: after `--help`, or for an unknown flag.
    """
    parser = build_parser(ServerConfig, "quire serve", DESCRIPTION)
    return read_settings(ServerConfig, parser, argv, environment() if environ is None else environ)
