import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.config import DESCRIPTION, ServerConfig, read_config
from server.flags import OTHER_VARIABLES, ConfigError, build_parser, flags_of, size

CONTRACT_FLAGS = [
    "--host", "--port", "--served-model-name", "--api-key", "--api-key-file", "--device", "--dtype",
    "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--max-num-queued-reqs",
    "--max-num-queued-tokens", "--block-size", "--kv-cache-memory", "--num-kv-blocks", "--gpu-memory-utilization",
    "--kv-cache-dtype", "--quantization", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--scheduling-policy", "--chat-template", "--generation-config", "--tool-call-parser", "--reasoning-parser",
    "--max-logprobs", "--strict-params", "--sampler-order", "--allowed-origins", "--max-request-bytes",
    "--shutdown-timeout", "--sse-keep-alive-interval", "--queue-timeout", "--seed", "--threads", "--log-level",
    "--log-format", "--disable-vllm-metrics", "--config",
]  # fmt: skip


def test_defaults_are_those_of_the_contract():
    config = read_config([], {})
    assert (config.host, config.port, config.max_num_queued_reqs, config.block_size) == ("127.0.0.1", 8000, 1024, 16)
    assert (config.max_request_bytes, config.shutdown_timeout, config.sse_keep_alive_interval) == (32_000_000, 30, 15)
    assert config.enable_prefix_caching
    assert not config.strict_params
    assert config.max_num_seqs is None


def test_help_names_every_flag_of_the_contract():
    help_text = build_parser(ServerConfig, "quire serve", DESCRIPTION).format_help()
    missing = [flag for flag in CONTRACT_FLAGS if not re.search(rf"{flag}\b", help_text)]
    assert not missing


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path):
    file = tmp_path / "quire.yaml"
    file.write_text("port: 1001\nmax-num-seqs: 7\nblock_size: 8\n")
    environ = {"QUIRE_CONFIG": str(file), "QUIRE_PORT": "1002", "QUIRE_MAX_NUM_SEQS": "9", "HOME": "/nowhere"}
    config = read_config(["--port", "1003"], environ)
    assert (config.port, config.max_num_seqs, config.block_size) == (1003, 9, 8)


def test_every_setting_can_come_from_flag_variable_and_file(tmp_path):
    values = {
        "model": "org/name", "host": "0.0.0.0", "port": "9000", "served_model_name": "a", "api_key": "k",
        "api_key_file": None, "device": "cpu", "dtype": "bfloat16", "quantization": "int8", "max_model_len": "512",
        "max_num_seqs": "4", "max_num_batched_tokens": "64", "max_num_queued_reqs": "3", "max_num_queued_tokens": "99",
        "block_size": "32", "kv_cache_memory": "2GiB", "num_kv_blocks": "10", "gpu_memory_utilization": "0.5",
        "kv_cache_dtype": "fp8", "reply_memory": "1MiB", "enable_prefix_caching": "false", "enforce_eager": "true",
        "scheduling_policy": "priority",
        "prefix_pin_budget": "0.25", "kv_host_memory": "1GiB", "kv_disk_path": "kv", "kv_disk_size": "5GiB",
        "kv_events_endpoint": "tcp://*:5557", "kv_events_replay_endpoint": "tcp://*:5558", "kv_events_topic": "kv",
        "forecast_admission": "false", "max_preemptions": "2", "decode_stretch": "2", "max_steps_in_flight": "2",
        "attention_backend": "reference", "chat_template": "{{ messages }}", "generation_config": "none",
        "trust_request_chat_template": "true", "tool_call_parser": "hermes", "reasoning_parser": "think",
        "max_logprobs": "5", "strict_params": "yes", "allowed_origins": "*", "max_request_bytes": "1MB",
        "sampler_order": "mask,logit_bias,temperature,typical_p,top_k,top_p,min_p,penalties", "seed": "-3",
        "queue_timeout": "2.5", "shutdown_timeout": "0", "sse_keep_alive_interval": "1", "threads": "2",
        "log_level": "debug", "log_format": "json", "disable_vllm_metrics": "on",
    }  # fmt: skip
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret\n")
    values["api_key_file"] = str(keys)
    assert set(values) == set(flags_of(ServerConfig)), "a new setting needs a value here"

    from_variables = read_config([], {f"QUIRE_{name.upper()}": value for name, value in values.items()})
    file = tmp_path / "all.yaml"
    file.write_text("".join(f"{name}: '{value}'\n" for name, value in values.items()))
    from_file = read_config(["--config", str(file)], {})
    argv = [values["model"]]
    for name, spec in flags_of(ServerConfig).items():
        dashed = name.replace("_", "-")
        if spec.switch:
            argv.append(f"--no-{dashed}" if values[name] == "false" else f"--{dashed}")
        elif not spec.positional:
            argv.append(f"--{dashed}={values[name]}")
    from_flags = read_config(argv, {})

    assert from_variables == from_file == from_flags
    defaults = ServerConfig()
    unchanged = {
        f.name for f in dataclasses.fields(defaults) if getattr(from_flags, f.name) == getattr(defaults, f.name)
    }
    assert not unchanged


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port", "70000"], {}, "--port: expected a whole number from 0 to 65535, got '70000'"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs: expected a whole number of at least 1"),
        (["--gpu-memory-utilization", "nan"], {}, "--gpu-memory-utilization: expected a number above 0 and at most 1"),
        (["--queue-timeout", "inf"], {}, "--queue-timeout: expected a number above 0"),
        (["--dtype", "int8"], {}, "--dtype: expected one of auto, bfloat16, float16, float32, got 'int8'"),
        (["--kv-cache-memory", "2 elephants"], {}, "--kv-cache-memory: expected a number of bytes such as 2GiB"),
        (["--kv-cache-dtype", "int3"], {}, "--kv-cache-dtype: expected one of auto"),
        (["--kv-disk-size", "0"], {}, "--kv-disk-size: expected a number of bytes above 0, such as 2GiB, got '0'"),
        (["--kv-host-memory", "0MB"], {}, "--kv-host-memory: expected a number of bytes above 0"),
        (["--attention-backend", "flash"], {}, "--attention-backend: expected one of auto, native, torch, reference"),
        (["--quantization", "magic"], {}, "--quantization: expected one of auto, none, int8, int4, int4_g128"),
        (["--sampler-order", "top_k,mask"], {}, "--sampler-order: expected all of mask,"),
        (["--api-key="], {}, "--api-key"),
        (["--max-num-seqs=64", "--max-num-batched-tokens=8"], {}, "--max-num-batched-tokens (8) must be at least"),
        ([], {"QUIRE_STRICT_PARAMS": "maybe"}, "QUIRE_STRICT_PARAMS: expected true or false, got 'maybe'"),
        ([], {"QUIRE_PROT": "1"}, "unknown environment variable QUIRE_PROT; did you mean QUIRE_PORT?"),
        (["--config", "/does/not/exist.yaml"], {}, "cannot read the config file /does/not/exist.yaml"),
    ],
)
def test_a_wrong_value_is_one_clear_line(argv, environ, message):
    with pytest.raises(ConfigError) as error:
        read_config(argv, environ)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "unknown setting 'prot'"),
        ("- 1\n- 2", "must hold settings by name"),
        ("port: [1, 2]", "expected a whole number from 0 to 65535, got [1, 2]"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path, content, message):
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_config(["--config", str(file)], {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--max-num-sqes", "4"], "quire serve: unknown flag --max-num-sqes; did you mean --max-num-seqs?\n"),
        (["--max-num", "4"], "quire serve: unknown flag --max-num; did you mean --max-num-seqs?\n"),
        (["model", "another"], "quire serve: unexpected argument 'another'\n"),
        (["--port"], "quire serve: argument --port: expected one argument\n"),
    ],
)
def test_an_unknown_flag_exits_with_one_line_and_status_2(capsys, argv, line):
    with pytest.raises(SystemExit) as stop:
        read_config(argv, {})
    assert stop.value.code == 2
    assert capsys.readouterr().err == line


def test_repeatable_settings(tmp_path):
    assert read_config(["--api-key", "a", "--api-key", "b,c"], {}).api_key == ("a", "b,c")
    assert read_config([], {"QUIRE_API_KEY": "a, b"}).api_key == ("a", "b")
    file = tmp_path / "keys.yaml"
    file.write_text("api-key: [a, b]\nallowed_origins: '*'\n")
    config = read_config(["--config", str(file)], {})
    assert (config.api_key, config.allowed_origins) == (("a", "b"), ("*",))


def test_secrets_are_neither_printed_nor_logged():
    config = read_config(["--api-key", "hush", "--port", "1"], {})
    assert "hush" not in repr(config)
    assert config.visible() == {"port": 1}


def test_variables_that_are_no_settings_break_nothing():
    links = {  # what Kubernetes sets beside a Service called "quire"
        "QUIRE_PORT": "tcp://10.0.0.1:8000",
        "QUIRE_SERVICE_HOST": "10.0.0.1",
        "QUIRE_SERVICE_PORT": "8000",
        "QUIRE_SERVICE_PORT_HTTP": "8000",
        "QUIRE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "QUIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "QUIRE_CACHE_DIR": "/tmp/kernels",
    }
    assert read_config([], links).port == 8000


def test_every_variable_that_the_engine_reads_is_known():
    sources = (Path(__file__).resolve().parents[2] / "engine").rglob("*.py")
    read = {name for source in sources for name in re.findall(r"\bQUIRE_[A-Z_]+\b", source.read_text())}
    assert read
    assert read <= OTHER_VARIABLES


@settings(deadline=None)
@given(st.integers(0, 2**50))
def test_sizes_mean_what_they_say(count):
    assert size(str(count)) == count
    assert size(f"{count}B") == count
    assert size(f"{count}KiB") == count * 1024
    assert size(f"{count} mb") == count * 10**6
    assert size(f"{count}G") == count * 10**9


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3MB", "1iB", "1 XB", "0x10", "1e6"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="number of bytes"):
        size(text)
