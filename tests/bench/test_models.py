"""Models made here: every token of a random one has a text, and its GGUF forms are the same model."""

import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from bench.gguf_forms import convert_folder, convert_gguf
from bench.models import cache_folder, model_path
from bench.random_model import Shape, write_random_model
from bench.reference import continuation, load, write_folder
from bench.session import Local, gate_prompts
from engine.models.load import read_spec
from engine.weights.checkpoint import ModelSource, resolve_model
from engine.weights.gguf_header import read_gguf_header
from server.text.tokenizer import Tokenizer

SHAPE = Shape(64, 96, 2, 4, 2, 49_200, 512)
PROMPT = [504, 2365, 1820, 49_199]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("random")
    write_random_model(SHAPE, resolve_model(None).path, made)
    return made


def test_a_random_model_has_its_shape_and_a_text_for_every_token(folder):
    spec = read_spec(ModelSource(folder, "safetensors", "random"))
    assert (spec.num_layers, spec.hidden_size, spec.kv_size, spec.vocab_size) == (2, 64, 32, 49_200)
    tokenizer = Tokenizer.from_pretrained(str(folder))
    assert tokenizer.vocab_size == 49_200
    assert len({tokenizer.token_bytes(token_id) for token_id in range(49_150, 49_200)}) == 50
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("The same words") == Tokenizer.from_gguf(
        read_gguf_header(resolve_model(None).path).metadata
    ).encode("The same words")


@pytest.fixture(scope="module")
def forms(folder, tmp_path_factory):
    made = tmp_path_factory.mktemp("forms")
    exact, eight = made / "bf16.gguf", made / "q8_0.gguf"
    convert_folder(folder, resolve_model(None).path, exact, "bf16")
    convert_gguf(exact, eight, "q8_0")
    return exact, eight


def test_its_forms_are_the_same_model(folder, forms, tmp_path):
    exact, eight = forms
    again = tmp_path / "again"
    again.mkdir()
    write_folder(exact, again)
    assert continuation(load(again), PROMPT, 3) == continuation(load(folder), PROMPT, 3)
    assert read_spec(ModelSource(again, "safetensors", "again")).hidden_size == 64
    headers = [read_gguf_header(path) for path in (exact, eight)]
    assert headers[0].metadata.keys() == headers[1].metadata.keys()
    assert len(headers[1].metadata["tokenizer.ggml.tokens"]) == 49_200


def test_another_encoding_keeps_every_value_nearly(forms):
    read = [{one.name: one for one in GGUFReader(path).tensors} for path in forms]
    assert read[0].keys() == read[1].keys()
    for name, one in read[0].items():
        other = read[1][name]
        assert other.tensor_type.name == ("F32" if len(other.shape) == 1 else "Q8_0")
        values = [dequantize(tensor.data, tensor.tensor_type) for tensor in (one, other)]
        assert abs(values[0] - values[1]).max() <= abs(values[0]).max() / 127


def test_models_are_named_and_kept_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path / "bench"
    assert model_path("smollm2") == resolve_model(None).path
    made = tmp_path / "bench" / "smollm2-q8_0-v1"
    made.mkdir(parents=True)
    (made / "smollm2-q8_0.gguf").touch()
    assert model_path("smollm2:q8_0") == made / "smollm2-q8_0.gguf"
    with pytest.raises(ValueError, match="the forms are"):
        model_path("smollm2:q3")


def test_a_local_model_tells_its_cost_and_prompts_that_are_the_same_as_text():
    from bench.targets import Served

    local = Local.of("smollm2")
    cost = local.cost(Served(weight_bytes=97_000_000, dtype="float32"))
    assert cost.num_layer_params == 106_168_320
    assert cost.num_head_params == 49_152 * 576
    assert cost.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert local.cost(Served()) is None
    prompts = gate_prompts(local)
    assert len(prompts) == 3
    assert all(local.tokenizer.encode(local.decode(prompt)) == prompt for prompt in prompts)
