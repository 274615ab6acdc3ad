"""The composition root: the one place that knows every storey and puts a server together.

`load` does everything slow (call it in a thread); `assemble` wires what was loaded, on the event loop. Decides nothing
about requests and nothing about tensors.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig, Progress
from engine.device import resolve_device
from engine.engine import Engine
from engine.models.load import read_generation_config
from engine.weights.checkpoint import ModelSource, resolve_model
from kvpool.disk import disk_tier
from kvpool.pool import BlockPool
from kvpool.prefix import namespace_root
from kvpool.tier import BlockTier, HostTier, Tiers
from scheduler.config import SchedulerConfig, SchedulingPolicy
from scheduler.loop import Scheduler
from scheduler.observer import NullObserver, Observer, Observers
from scheduler.offload import Backing
from server.config import ServerConfig
from server.flags import ConfigError
from server.kv_events import EventSettings, KVEvents
from server.metrics import Metrics, ModelLabels
from server.state import Served
from server.text.own_template import OwnTemplates
from server.text.reasoning import detect_reasoning, reasoning_parsers
from server.text.replies import ReplyMemory
from server.text.structured import StructuredCompiler
from server.text.template import ChatTemplate, TemplateError
from server.text.tokenizer import Tokenizer
from server.text.tools.check import ToolCheck
from server.text.tools.registry import select_dialect

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""What a model's generation config may set; the rest of that file concerns other programs."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory and what came with it.

    Attributes:
        template: None when the model brings no chat template and none was given.
        generation: the model's generation config, or what `--generation-config` named.
        stop_token_ids: tokens that end an answer.
    """

    source: ModelSource
    engine: Engine
    engine_config: EngineConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation: Mapping[str, Any]
    stop_token_ids: frozenset[int]


def load(config: ServerConfig, progress: Progress) -> Loaded:
    """Find, read and warm up the model. Slow; needs no event loop.

    Raises:
        LoadError: the model cannot be loaded as asked.
        ConfigError: a setting does not fit this model.
    """
    progress("finding the model", 0.0)
    source = resolve_model(config.model)
    progress("reading the tokenizer", 0.0)
    tokenizer = _tokenizer(source)
    template = _template(config.chat_template, tokenizer)
    model_generation = read_generation_config(source)
    engine_config = engine_config_of(config)
    engine = Engine.load(source, engine_config, progress)
    return Loaded(
        source=source.closed(),
        engine=engine,
        engine_config=engine_config,
        tokenizer=tokenizer,
        template=template,
        generation=_generation(config.generation_config, model_generation),
        stop_token_ids=_stop_token_ids(model_generation, tokenizer),
    )


def assemble(loaded: Loaded, config: ServerConfig, metrics: Metrics | None = None) -> Served:
    """Wire a loaded model to a scheduler and to everything that turns text into requests and back.

    Raises:
        ConfigError: a parser named in the settings does not exist, the model names no token that ends an answer, or
            what stands behind the KV cache cannot be used.
    """
    info = loaded.engine.info
    names = config.served_model_name or (loaded.source.name,)
    scheduler = _scheduler(loaded, config, metrics or NullObserver())
    if metrics is not None:
        labels = ModelLabels(
            model_name=names[0],
            dtype=info.dtype,
            device=info.device,
            max_model_len=info.max_model_len,
            block_size=info.layout.block_size,
            num_blocks=info.num_blocks,
            weight_bytes=info.weight_bytes,
            kv_bytes_per_token=info.layout.bytes_per_token,
        )
        metrics.attach(labels, scheduler.stats)
    template_text = loaded.template.source if loaded.template is not None else None
    namespace = _namespace(loaded)
    try:
        dialect = select_dialect(config.tool_call_parser, template_text)
        structured = StructuredCompiler(loaded.tokenizer, info.vocab_size, loaded.stop_token_ids)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Served(
        model_names=names,
        created=int(time.time()),
        tokenizer=loaded.tokenizer,
        template=loaded.template,
        own_templates=OwnTemplates(loaded.tokenizer.special_tokens),
        scheduler=scheduler,
        structured=structured,
        tool_dialect=dialect,
        tool_check=ToolCheck(),
        reasoning=_reasoning(config.reasoning_parser, template_text),
        generation_defaults={name: loaded.generation[name] for name in _SAMPLING_DEFAULTS if name in loaded.generation},
        stop_token_ids=loaded.stop_token_ids,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        namespace=namespace,
        fingerprint=_fingerprint(namespace, loaded),
        dtype=info.dtype,
        kv_layout=info.layout,
        kv_dtype=info.kv_dtype,
        replies=_replies(loaded.tokenizer, config),
    )


def engine_config_of(config: ServerConfig) -> EngineConfig:
    """The engine's part of the settings, with the defaults that depend on the device filled in."""
    on_cpu = resolve_device(config.device).type == "cpu"
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    return EngineConfig(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(max_num_seqs, 512 if on_cpu else 8192),
        max_model_len=config.max_model_len,
        threads=config.threads,
        seed=config.seed,
        attention_backend=config.attention_backend,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        enforce_eager=config.enforce_eager,
    )


def _scheduler(loaded: Loaded, config: ServerConfig, observer: Observer) -> Scheduler:
    info, engine_config = loaded.engine.info, loaded.engine_config
    settings = SchedulerConfig(
        max_num_seqs=engine_config.max_num_seqs,
        max_num_batched_tokens=engine_config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=info.layout.block_size,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        policy=SchedulingPolicy(config.scheduling_policy),
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_pin_share=config.prefix_pin_budget,
        forecast_admission=config.forecast_admission,
        max_preemptions=config.max_preemptions,
        decode_stretch=config.decode_stretch,
        max_steps_in_flight=config.max_steps_in_flight or (2 if info.device.startswith("cuda") else 1),
    )
    events = _kv_events(loaded, config)
    backing = Backing(_tier(loaded, config), events)
    observers = observer if events is None else Observers(observer, events)
    return Scheduler(loaded.engine, BlockPool(info.num_blocks), settings, observer=observers, backing=backing)


def _tier(loaded: Loaded, config: ServerConfig) -> BlockTier | None:
    """Where KV blocks go that the pool has no room for, as the settings say."""
    tiers: list[BlockTier] = []
    block_bytes = loaded.engine.info.layout.bytes_per_block
    if config.kv_host_memory is not None:
        _check_room("--kv-host-memory", config.kv_host_memory, block_bytes)
        tiers.append(HostTier(config.kv_host_memory))
    if config.kv_disk_path is not None:
        _check_room("--kv-disk-size", config.kv_disk_size, block_bytes)
        try:
            tiers.append(
                disk_tier(Path(config.kv_disk_path), _kv_fingerprint(loaded), block_bytes, config.kv_disk_size)
            )
        except OSError as error:
            raise ConfigError(f"--kv-disk-path: cannot use {config.kv_disk_path}: {error}") from error
    if tiers and not config.enable_prefix_caching:
        raise ConfigError("--kv-host-memory and --kv-disk-path need prefix caching, which is switched off")
    return Tiers(*tiers) if tiers else None


def _check_room(flag: str, num_bytes: int, block_bytes: int) -> None:
    if num_bytes < block_bytes:
        raise ConfigError(f"{flag}: {num_bytes} bytes have no room for a KV block, which takes {block_bytes}")


def _kv_fingerprint(loaded: Loaded) -> bytes:
    """What KV blocks on a disk depend on besides their digests: the very weights, by names, sizes and times."""
    path = loaded.source.path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    weights = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return namespace_root(*_namespace(loaded), loaded.engine.info.attention_backend, *weights)


def _kv_events(loaded: Loaded, config: ServerConfig) -> KVEvents | None:
    if config.kv_events_endpoint is None:
        return None
    info = loaded.engine.info
    medium = "CPU" if info.device == "cpu" else "GPU"
    endpoints = (config.kv_events_endpoint, config.kv_events_replay_endpoint)
    return KVEvents(EventSettings(*endpoints, config.kv_events_topic, info.layout.block_size, medium))


def _tokenizer(source: ModelSource) -> Tokenizer:
    if source.kind == "gguf":
        return Tokenizer.from_gguf(source.gguf_header.metadata)
    return Tokenizer.from_pretrained(str(source.path))


def _template(given: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    text = tokenizer.chat_template if given is None else _given_template(given)
    try:
        return None if text is None else ChatTemplate(text, tokenizer)
    except TemplateError as error:
        hint = "; --chat-template can replace it" if given is None else ""
        raise ConfigError(f"{error}{hint}") from error


def _given_template(given: str) -> str:
    if "{" in given:  # a template: without a brace it could say nothing, and paths rarely have one
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {given}: {error}") from error


def _generation(setting: str, from_model: Mapping[str, Any]) -> Mapping[str, Any]:
    if setting == "auto":
        return from_model
    if setting in ("none", "vllm"):
        return {}
    path = Path(setting)
    file = path / "generation_config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--generation-config: cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--generation-config: {file} must hold a JSON object")
    return content


def _stop_token_ids(generation: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    ids = generation.get("eos_token_id")
    from_model = ids if isinstance(ids, list) else [ids]
    return frozenset(token_id for token_id in (*from_model, tokenizer.eos_token_id) if token_id is not None)


def _reasoning(setting: str, template_text: str | None) -> str | None:
    name = detect_reasoning(template_text) if setting == "auto" else setting
    if name not in (*reasoning_parsers(), "none"):
        raise ConfigError(f"--reasoning-parser: expected one of auto, none, {', '.join(reasoning_parsers())}")
    return None if name == "none" else name


def _replies(tokenizer: Tokenizer, config: ServerConfig) -> ReplyMemory | None:
    """Where answers' tokens are kept; nowhere when no later turn could find their KV."""
    is_useful = config.reply_memory > 0 and config.enable_prefix_caching
    return ReplyMemory(tokenizer, config.reply_memory) if is_useful else None


def _namespace(loaded: Loaded) -> tuple[str, ...]:
    """What makes two KV caches differ besides the tokens: see `kvpool.prefix.namespace_root`."""
    template = loaded.template.source if loaded.template is not None else ""
    return (
        str(loaded.source.path),
        loaded.tokenizer.fingerprint,
        hashlib.sha256(template.encode()).hexdigest(),
        repr(loaded.engine.info.layout),
        loaded.engine.info.dtype,
        loaded.engine.info.kv_dtype,
    )


def _fingerprint(namespace: tuple[str, ...], loaded: Loaded) -> str:
    """Changes when an answer to the same seed may change: model, tokenizer, template, dtype, software."""
    name, *rest = namespace
    parts = (Path(name).name, *rest, loaded.engine.info.device, torch.__version__, version("quire"))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
