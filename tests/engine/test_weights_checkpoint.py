"""Finding a model, reading safetensors, and strict assignment: every error names what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import no_progress
from engine.errors import LoadError
from engine.models.load import (
    load_decoder,
    read_checkpoint_dtype,
    read_generation_config,
    read_spec,
    weight_bytes_of,
)
from engine.models.native_decoder import NativeDecoder
from engine.weights.checkpoint import ModelSource, resolve_model
from engine.weights.safetensors import SafetensorsCheckpoint
from tests.fakes.naive_attention import naive_logits
from tests.fakes.tiny_models import make_tiny_model

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")


def load(folder: Path) -> None:
    load_decoder(resolve_model(str(folder)), torch.float32, CPU, no_progress)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of the single safetensors file; dots are written as __."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)


# --- finding a model


def test_the_default_model_is_the_embedded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_DEFAULT_MODEL", raising=False)
    source = resolve_model(None)
    assert (source.kind, source.name, source.path.suffix) == ("gguf", "SmolLM2-135M-Instruct", ".gguf")
    assert source.path.is_file()


def test_the_default_model_can_be_named_by_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DEFAULT_MODEL", str(folder))
    assert resolve_model(None) == ModelSource(folder, "safetensors", "tiny-llama")


def test_the_default_model_is_found_in_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_DEFAULT_MODEL", raising=False)
    monkeypatch.setattr("engine.weights.checkpoint._DEFAULT_DISTRIBUTION", "no-such-distribution")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"QUIRE_DEFAULT_MODEL is not set.*no-such-distribution.*models/"):
        resolve_model(None)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct-Q8_0.gguf").touch()
    assert resolve_model(None).path.name == "SmolLM2-135M-Instruct-Q8_0.gguf"


def test_folders_and_files_are_told_apart(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(folder)).kind == "safetensors"
    other = tmp_path / "quantized"
    other.mkdir()
    with pytest.raises(LoadError, match=r"no config\.json, and no \.gguf file"):
        resolve_model(str(other))
    for index in (1, 2):
        (other / f"model-0000{index}-of-00002.gguf").touch()
    assert resolve_model(str(other)) == ModelSource(other / "model-00001-of-00002.gguf", "gguf", "quantized")
    (other / "second.gguf").touch()
    with pytest.raises(LoadError, match="name one of them"):
        resolve_model(str(other))
    assert resolve_model(str(other / "second.gguf")) == ModelSource(other / "second.gguf", "gguf", "second")
    with pytest.raises(LoadError, match=r"not a \.gguf file"):
        resolve_model(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["/no/such/folder", "missing.gguf", "a/b/c", "~/nothing here"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(LoadError, match="no such file or folder") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)


def test_a_hub_id_is_fetched_through_the_hub_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("owner/name") == ModelSource(folder, "safetensors", "owner/name")
    assert asked["repo_id"] == "owner/name"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, and nothing in the cache: the hub client's own refusal, no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match=r"'owner/not-cached'.*not from the hub"):
        resolve_model("owner/not-cached")


# --- safetensors


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    sharded = make_tiny_model("llama", tmp_path, max_shard_size="60KB")
    with SafetensorsCheckpoint(sharded) as checkpoint:
        index = json.loads((sharded / "model.safetensors.index.json").read_text())
        assert set(checkpoint.names()) == set(index["weight_map"])
        assert checkpoint.shape(Q_PROJ) == (64, 64)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = make_tiny_model("llama", tmp_path, max_shard_size="60KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(LoadError, match=victim.name):
        load(sharded)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    sharded = make_tiny_model("llama", tmp_path, max_shard_size="60KB")
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][Q_PROJ]
    path.write_text(json.dumps(index))
    with pytest.raises(LoadError, match=rf"{Q_PROJ} is not in the index"):
        load(sharded)
    path.write_text("[]")
    with pytest.raises(LoadError, match="not a weight index"):
        load(sharded)


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LoadError, match=r"model\.safetensors: cannot be read"):
        load(folder)


def test_a_folder_without_weights_says_what_was_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(LoadError, match=r"no model\.safetensors.*\.bin files are pickles"):
        load(folder)


def test_several_files_without_an_index_are_joined(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, folder / "b.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    path.unlink()
    load(folder)
    save_file({names[0]: tensors[names[0]]}, folder / "c.safetensors")
    with pytest.raises(LoadError, match=rf"{names[0]} is in both"):
        load(folder)


# --- strict assignment


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{Q_PROJ.replace(".", "__"): None})
    with pytest.raises(LoadError, match=rf"tensor {Q_PROJ} is missing"):
        load(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__layers__0__mlp__extra__weight=torch.ones(3))
    with pytest.raises(LoadError, match=r"tensor model\.layers\.0\.mlp\.extra\.weight is not part of this model"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__q_proj__weight=torch.ones(64, 32))
    with pytest.raises(LoadError, match=rf"{Q_PROJ} is \[64, 32\] in the checkpoint, the model needs \[64, 64\]"):
        load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(LoadError, match=r"model\.layers\.2\.\S+ and 6 more are missing"):
        load(folder)


def test_an_absent_head_of_an_untied_model_is_missing(folder: Path) -> None:
    rewrite(folder, lm_head__weight=None)
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        load(folder)


def test_harmless_leftovers_are_accepted(tmp_path: Path) -> None:
    """Rotary buffers of older exports, and a stored copy of a tied head."""
    folder = make_tiny_model("smollm2", tmp_path)
    source = resolve_model(str(folder))
    before = naive_logits(load_decoder(source, torch.float32, CPU, no_progress), [1, 2, 3])
    rewrite(
        folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8), lm_head__weight=torch.ones(288, 64)
    )
    after = naive_logits(load_decoder(source, torch.float32, CPU, no_progress), [1, 2, 3])
    assert torch.equal(before, after)


# --- loading as a whole


@pytest.mark.parametrize(("family", "dtype"), [("qwen2", torch.float32), ("mistral", torch.bfloat16)])
def test_weight_bytes_are_known_before_and_equal_after(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = resolve_model(str(make_tiny_model(family, tmp_path)))
    decoder = load_decoder(source, dtype, CPU, no_progress)
    assert decoder.weight_bytes == weight_bytes_of(source, dtype, CPU, no_progress)
    vector_bytes = 4 if isinstance(decoder, NativeDecoder) else dtype.itemsize  # the kernels add norms in float32
    stored = load_file(tmp_path / "model.safetensors").values()
    assert decoder.weight_bytes == sum(t.numel() * (dtype.itemsize if t.ndim > 1 else vector_bytes) for t in stored)


def test_progress_rises_to_one(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    load_decoder(resolve_model(str(folder)), torch.float32, CPU, lambda phase, done: told.append((phase, done)))
    fractions = [done for phase, done in told if phase == "loading weights"]
    assert {phase for phase, _ in told} <= {"compiling native kernels", "loading weights"}
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1], len(fractions)) == (0.0, 1.0, 22)


def test_generation_settings_and_dtype(folder: Path) -> None:
    source = resolve_model(str(folder))
    settings = read_generation_config(source)
    assert settings["eos_token_id"] == [2, 0]
    assert (settings["temperature"], settings["top_k"]) == (0.7, 20)
    assert read_checkpoint_dtype(source) == torch.float32
    (folder / "generation_config.json").unlink()
    assert read_generation_config(source) == {"eos_token_id": [2]}
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16", "eos_token_id": None}))
    assert read_generation_config(source) == {"eos_token_id": []}
    assert read_checkpoint_dtype(source) == torch.float16


def test_a_damaged_config_is_named(folder: Path) -> None:
    for content in ("{", "[]"):
        (folder / "config.json").write_text(content)
        with pytest.raises(LoadError, match=r"config\.json"):
            read_spec(resolve_model(str(folder)))
