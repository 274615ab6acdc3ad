"""`quire plan`: the numbers of two known models, the table's arithmetic, and what it suggests."""

import json
import re
from typing import Any

import pytest

from engine.weights.checkpoint import resolve_model
from server.cli import main

LLAMA = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--parameters", "8030261248"]
QWEN = ["--layers", "28", "--kv-heads", "4", "--head-dim", "128", "--parameters", "7615616512"]
SMOLLM2 = str(resolve_model(None).path)
GIB = 1 << 30


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(["plan", *argv])
    return status, capsys.readouterr().out


def numbers(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return json.loads(plan(capsys, *argv, "--json")[1])


def test_llama_3_8b_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    got = numbers(capsys, *LLAMA, "--memory", "24GiB", "--reserve", "1GiB")
    assert got["weight_bytes"] == 16_060_522_496
    assert got["kv_bytes_per_token"] == 131_072
    assert got["num_tokens"] == 65_883  # (24 GiB - 16,060,522,496 - 1 GiB) / 131,072
    assert got["users"]["8192"] == 8
    assert got["fits"] is True


def test_smollm2_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    got = numbers(capsys, SMOLLM2, "--memory", "1GiB", "--reserve", "0", "--kv-cache-dtype", "int8")
    assert got["weight_bytes"] == 269_030_016
    assert got["kv_bytes_per_token"] == 11_880  # 2 x 30 x 3 x (64 + 2)
    assert got["num_tokens"] == 67_736  # 804,711,808 / 11,880
    assert list(got["users"]) == ["2048", "4096", "8192"]  # no further than the model's own context


def test_float32_doubles_both(capsys: pytest.CaptureFixture[str]) -> None:
    half, full = (numbers(capsys, *LLAMA, "--dtype", name, "--memory", "48GiB") for name in ("bfloat16", "float32"))
    assert full["weight_bytes"] == 2 * half["weight_bytes"]
    assert full["kv_bytes_per_token"] == 2 * half["kv_bytes_per_token"]


SHAPES = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248, {"auto": 131_072, "fp8": 66_560}),  # 2 x 32 x 8 x 128 x 2, or (128 + 2)
    "Qwen2.5-7B": (QWEN, 7_615_616_512, {"auto": 57_344, "fp8": 29_120}),  # 2 x 28 x 4 x 128 x 2
}


@pytest.mark.parametrize(("shape", "num_parameters", "per_token"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_the_table_is_the_formula(
    capsys: pytest.CaptureFixture[str], cache: str, shape: list[str], num_parameters: int, per_token: dict[str, int]
) -> None:
    """tokens = (memory - weights - reserve) / KV bytes per token, for each kind of weights on each card."""
    status, text = plan(capsys, *shape, "--table", "--reserve", "1GiB", "--kv-cache-dtype", cache)
    assert status == 0
    weights = {"float16": 2 * num_parameters, "int8": num_parameters * 17 // 16, "int4": num_parameters * 5 // 8}
    weights["int4_g128"] = num_parameters * 17 // 32
    rows = re.findall(r"^\| (\w+) \| (\d+)\.00 GiB \|.*\| ([\d,]+) \| [^|]*\|$", text, re.MULTILINE)
    wanted = [
        (name, str(memory), f"{max(0, (memory * GIB - weight_bytes - GIB) // per_token[cache]):,}")
        for name, weight_bytes in weights.items()
        for memory in (8, 16, 24)
    ]
    assert rows == wanted


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = plan(capsys, *LLAMA, "--memory", "24GiB", "--context", "8192", "--users", "16")
    assert status == 1
    assert "Does not fit: 16 x 8,192 tokens" in text
    suggestions = text.partition("What would:\n")[2].splitlines()
    assert [line.strip() for line in suggestions] == [
        "--kv-cache-dtype int8 --quantization int8 (220,262 tokens)",
        "--quantization int4 (138,655 tokens)",
        "--kv-cache-dtype int8 --quantization int4 (273,045 tokens)",
        "--quantization int4_g128 (144,399 tokens)",
        "--kv-cache-dtype int8 --quantization int4_g128 (284,356 tokens)",
        "6 users instead of 16",
        "--max-model-len 3392 for 16 users",
        "a memory of 34.40 GiB",
    ]


SUGGESTED = (
    ["--kv-cache-dtype", "int8", "--quantization", "int8"],
    ["--quantization", "int4"],
    ["--memory", "34.41GiB"],
    ["--users", "6"],
    ["--context", "3392"],
)


@pytest.mark.parametrize("change", SUGGESTED, ids=" ".join)
def test_each_suggestion_fits(capsys: pytest.CaptureFixture[str], change: list[str]) -> None:
    asked = {"--memory": "24GiB", "--context": "8192", "--users": "16"} | dict(
        zip(change[::2], change[1::2], strict=True)
    )
    assert plan(capsys, *LLAMA, *(word for pair in asked.items() for word in pair))[0] == 0


def test_weights_that_are_too_large_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = plan(capsys, *LLAMA, "--memory", "8GiB")
    assert status == 1
    assert "weights and reserve alone are" in text
    assert "--quantization int4" in text


def test_a_context_beyond_the_models_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = plan(capsys, SMOLLM2, "--context", "16384")
    assert "the model's context ends at 8,192" in text


WRONG = {
    "half a shape": (["--layers", "32"], "give --kv-heads, --head-dim, --parameters too"),
    "both a model and a shape": ([SMOLLM2, *LLAMA], "not both"),
    "no such model": (["/nowhere/at/all"], "no such file"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", [["--memory", "lots"], ["--parameters", "0"], ["--reserve", "100%"], ["--users", "0"]])
def test_values_out_of_range(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *argv])
    assert "expected" in capsys.readouterr().err
