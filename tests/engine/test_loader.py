"""Checkpoints: all formats give the same model, and broken files are refused with a helpful message."""

import json
import shutil
import tarfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from baton.engine import EngineConfig, Hooks, build_engine
from baton.engine.kernels import parts
from baton.engine.loader import check_model, model_fingerprint
from baton.engine.loader.hf import HFCheckpoint
from baton.engine.loader.hf_config import model_config_from_hf
from tests.engine.checkpoints import (
    assert_refused,
    config_of,
    edit_json,
    edited_copy,
    edited_tensors,
    flip_last_tensor,
    load,
)
from tests.engine.conftest import TinyOf, request_of, run, save_tiny, tokens_of


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "whole", "Llama").save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_the_fingerprint_does_not_depend_on_the_file_format(
    tiny_path: Path, sharded: Path, tmp_path: Path
) -> None:
    fingerprint = load(tiny_path).model_fingerprint
    assert load(sharded).model_fingerprint == fingerprint
    assert load(tiny_path, dtype="bfloat16", num_blocks=4).model_fingerprint == fingerprint
    other = shutil.copytree(tiny_path, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    assert load(other).model_fingerprint != fingerprint
    flip_last_tensor(other / "model.safetensors")
    edit_json(other / "config.json", rms_norm_eps=1e-6)
    assert load(other).model_fingerprint != fingerprint


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe", "Phi3", "Gemma3", "GptOss"])
def test_the_fingerprint_needs_no_loaded_model(tiny_of: TinyOf, kind: str) -> None:
    """As for a worker of another engine."""
    config, loaded = EngineConfig(str(tiny_of(kind))), load(tiny_of(kind))
    assert model_fingerprint(config, loaded.model_config.max_model_len) == loaded.model_fingerprint


def test_eos_ids_come_from_the_generation_config(tiny_path: Path, tmp_path: Path) -> None:
    assert load(tiny_path).model_config.eos_ids == (2,)
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    edit_json(copy / "generation_config.json", eos_token_id=[7, 9, 1 << 20, -1])
    assert load(copy).model_config.eos_ids == (7, 9)
    edit_json(copy / "generation_config.json", eos_token_id=None)
    assert load(copy).model_config.eos_ids == (2,)


def test_the_eos_beside_a_text_config_counts_before_that_in_it(tiny_of: TinyOf) -> None:
    """As in transformers 5, whose text models write a default."""
    config = json.loads((tiny_of("Gemma3") / "config.json").read_text())
    for beside, within, ends in (([1, 6], 1, (1, 6)), (None, 1, (1,)), (None, [1, 6], (1, 6)), (0, 1, (0,))):
        text = config["text_config"] | {"eos_token_id": within}
        read = model_config_from_hf(config | {"eos_token_id": beside, "text_config": text}, {}, "a")
        assert read.eos_ids == ends


def test_the_eos_of_the_tokenizer_ends_outputs_too(tiny_path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    added = [{"id": i, "content": name} for i, name in ((2, "</s>"), (5, "<|im_end|>"), (1 << 20, "<far>"))]
    tokenizer = {"model": {"vocab": {"<|end|>": 6}}, "added_tokens": added}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    (copy / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    for named, ends in (
        (None, (2, 6)),
        ("</s>", (2,)),
        ("<|im_end|>", (2, 5)),
        ({"content": "<|im_end|>"}, (2, 5)),
        ("<none>", (2,)),
        ("<far>", (2,)),
    ):
        (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert load(copy).model_config.eos_ids == ends, named
    given = load(tiny_path, tokenizer=str(copy))
    (copy / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert given.model_config.eos_ids == (2,)
    assert load(tiny_path, tokenizer=str(copy)).model_config.eos_ids == (2, 5), "that of --tokenizer"


def test_dtype_auto_is_that_of_the_checkpoint(tiny_path: Path, tmp_path: Path) -> None:
    copy = edited_copy(tiny_path, tmp_path, dtype="bfloat16")
    engine = load(copy, dtype="auto")
    assert engine.runner.model.embedding.weight.dtype is torch.bfloat16
    assert {parts(cache)[0].dtype for cache in engine.caches} == {torch.bfloat16}
    assert load(copy, dtype="float32").cache_spec[0].arrays[0].dtype == "float32"


def test_the_weights_of_a_repository_are_fetched_once(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many repositories have them a second time, in the format of their makers."""
    files = {path.name: path.read_bytes() for path in tiny_path.iterdir()}
    own = ["consolidated.safetensors", "original/model.safetensors", "original/config.json", "README.md"]
    files |= dict.fromkeys(own, b"{}")
    commit, fetched = "c0ffee" * 6 + "c0ff", set[str]()

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/models/a/b/revision/"):
                body = json.dumps(
                    {"id": "a/b", "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                ).encode()
            elif self.path.startswith("/api/models/a/b/tree/"):
                body = json.dumps(
                    [{"type": "file", "path": k, "size": len(v), "oid": "0"} for k, v in files.items()]
                ).encode()
            else:
                name = self.path.removeprefix(f"/a/b/resolve/{commit}/")
                fetched.add(name)
                body = files[name]
            self.send_response(200)
            self.send_header("ETag", f'"{abs(hash(self.path))}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            fingerprint = load(Path("a/b")).model_fingerprint
        finally:
            server.shutdown()
    assert fingerprint == load(tiny_path).model_fingerprint
    assert fetched.isdisjoint(own)
    assert "model.safetensors" in fetched


def test_the_weights_in_the_format_of_mistral_are_not_read(tiny_path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, copy / "consolidated.safetensors")
    assert load(copy).model_fingerprint == load(tiny_path).model_fingerprint


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["Llama", "Bamba", "Qwen3VL", "Gemma3", "Gemma4"])
def test_dummy_weights_need_the_configuration_only(kind: str, tiny_of: TinyOf, tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        if (tiny_of(kind) / name).exists():
            shutil.copy(tiny_of(kind) / name, tmp_path)
    one, same, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert one.model_fingerprint == same.model_fingerprint != other.model_fingerprint
    request = request_of(1, [3, 4, 5], max_tokens=8)
    assert run(one, [request])[request.id].tokens == run(same, [request])[request.id].tokens
    with pytest.raises(ValueError, match=r"no \*\.safetensors in there"):
        load(tmp_path)


def test_progress_and_ticks_while_loading(tiny_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    ticks: list[None] = []
    build_engine(
        EngineConfig(model=str(tiny_path), num_blocks=8),
        hooks=Hooks(
            tick=lambda: ticks.append(None),
            progress=lambda stage, fraction: stages.append((stage, fraction)),
        ),
    )
    assert {stage for stage, _ in stages} == {"loading weights"}
    assert stages == sorted(stages)
    assert stages[-1][1] == 1.0
    assert len(ticks) >= len(stages) > 10


# Broken directories


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def second_of(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[1]


def map_weights(weight_map: Any) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "model.safetensors.index.json", weight_map=weight_map)


def name_another(directory: Path) -> None:
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    map_weights({**weight_map, "model.layers.0.extra": weight_map["model.norm.weight"]})(directory)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: second_of(d).unlink(), r"model-00002\S+: missing, though .*index.json names it"),
        (lambda d: cut_short(second_of(d)), r"model-00002\S+: corrupt or cut short"),
        (name_another, r"\.safetensors: tensor model\.layers\.0\.extra is missing"),
        (map_weights(None), r"index\.json: has no weight_map"),
        (map_weights([]), r"index\.json: has no weight_map"),
        (
            map_weights({"model.norm.weight": "../x.safetensors"}),
            r"index\.json: tensor model\.norm\.weight must be in a file of this directory",
        ),
        (
            map_weights({"model.norm.weight": 7}),
            r"index\.json: tensor model\.norm\.weight must be in a file of this directory, not in 7",
        ),
    ],
)
def test_broken_shards(sharded: Path, harm: Callable[[Path], Any], message: str) -> None:
    harm(sharded)
    with pytest.raises(ValueError, match=message):
        load(sharded)


def changed(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with edited_tensors(directory) as tensors:
        change(tensors)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: (d / "model.safetensors").unlink(), r"no \*\.safetensors in there"),
        (lambda d: cut_short(d / "model.safetensors"), r"model\.safetensors: corrupt or cut short"),
        (
            lambda d: changed(d, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight")),
            r"layers\.2\.mlp\.up_proj\.weight is missing",
        ),
        (
            lambda d: changed(d, lambda tensors: tensors.update({"model.extra": torch.zeros(2)})),
            r"1 tensors are unknown to .*, such as model\.extra",
        ),
        (
            lambda d: edit_json(d / "config.json", intermediate_size=97),
            "by the model's configuration it should be",
        ),
    ],
)
def test_a_model_is_checked_without_reading_a_weight(
    harm: Callable[[Path], Any],
    message: str,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check raises the same error as loading."""
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    harm(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    monkeypatch.setattr(HFCheckpoint, "read", None)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    "kind",
    [
        "Llama",
        "Qwen2",
        "Qwen3",
        "Qwen3Moe",
        "Llama4",
        "GptOss",
        "DeepseekV3",
        "GlmMoeDsa",
        "Qwen3_5",
        "KimiLinear",
        "MiMoV2Flash",
        "MiniMaxM2",
        "Step3p7",
    ],
)
def test_a_whole_model_passes_its_check(kind: str, tiny_of: TinyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFCheckpoint, "read", None)
    check_model(EngineConfig(model=str(tiny_of(kind))))


def test_an_index_says_which_tensor_counts(
    tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files may have others: older ones of the same names, and those of another model."""
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    others = {"model.norm.weight": torch.full((64,), 9.0), "optimizer.step": torch.zeros(1)}
    save_file({**others, "lm_head.weight": tensors.pop("lm_head.weight")}, copy / "second.safetensors")
    save_file(tensors, copy / "model.safetensors")
    index = {**dict.fromkeys(tensors, "model.safetensors"), "lm_head.weight": "second.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    requests = [request_of(0, range(3, 40), max_tokens=8, ignore_eos=True)]
    assert tokens_of(load(copy), requests) == tokens_of(load(tiny_path), requests)
    assert (
        "files have 2 tensors that model.safetensors.index.json does not name there, such as" in caplog.text
    )


def test_the_same_tensor_in_two_files(tiny_path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    shutil.copy(copy / "model.safetensors", copy / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor \S+ is in model-2\.safetensors too"):
        load(copy)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (torch.nan, "float32", r"has values that are not finite numbers in torch\.float32: it is corrupt"),
        (-torch.inf, "bfloat16", r"has values that are not finite numbers in torch\.bfloat16"),
        (1e6, "float16", r"has values that are not finite .* it is corrupt, or needs another --dtype"),
        (1e6, "float32", None),
        (torch.float8_e4m3fn, "float32", r"is of torch\.float8_e4m3fn, which is not supported"),
        (torch.int8, "float32", r"is of torch\.int8, which is not supported"),
    ],
)
def test_weights_that_are_not_finite_or_of_an_unsupported_type_are_refused(
    tiny_path: Path, tmp_path: Path, value: Any, dtype: str, message: str | None
) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    name = "model.layers.1.mlp.up_proj.weight"  # in the middle of a fused weight
    with edited_tensors(copy) as tensors:
        if isinstance(value, torch.dtype):
            tensors[name] = tensors[name].to(value)
        else:
            tensors[name][5, 7] = value
    if message is None:
        load(copy, dtype=dtype)
        return
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {name} {message}"):
        load(copy, dtype=dtype)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in there, so it is not a model directory$"):
        load(tmp_path)
    for name in ("b/model.gguf", "models--a--c/snapshots/123"):  # as users have them on disk
        (tmp_path / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=rf"not a model directory; name .*{name}$"):
            load(tmp_path / name.partition("/")[0])
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as file:
        file.add(tmp_path / "b")
    with pytest.raises(ValueError, match=r"model\.tar\.gz: not a GGUF file"):
        load(tmp_path / "model.tar.gz")
    with pytest.raises(ValueError, match=r"--model /no/such: no such file or directory"):
        load(Path("/no/such"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load(tmp_path)


# The user's configuration


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "fp8", "--dtype 'fp8': choose one of auto, float32, bfloat16, float16"),
        ("device", "tpu", "--device 'tpu': choose cpu, cuda or cuda:N"),
        ("device", "cuda:", "--device 'cuda:': choose"),
        ("load_format", "pt", "--load-format 'pt': choose one of auto, dummy"),
        ("block_size", 0, "--advanced.block-size 0: must be at least 1"),
        ("block_size", 24, "--advanced.block-size 24: choose a divisor or a multiple of 64"),
        ("block_size", 96, "--advanced.block-size 96: choose a divisor or a multiple of 64"),
        ("num_blocks", -1, "--advanced.num-blocks -1: must be at least 1"),
        ("max_num_seqs", 4096, "--max-num-batched-tokens 2048: a step decodes .* at least --max-num-seqs"),
        ("gpu_memory_utilization", 1.2, "--gpu-memory-utilization 1.2: must be above 0"),
        ("model", "", "--model '': give a directory"),
        ("disk_cache_size", -1, "--disk-cache-size -1: must not be negative"),
        ("disk_cache_size", 1, "--disk-cache-size: needs --disk-cache-dir"),
    ],
)
def test_configuration_errors_name_flag_and_remedy(field: str, value: Any, message: str) -> None:
    settings: dict[str, Any] = {"model": "m", "enable_prefix_caching": True, field: value}
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_the_text_model_of_a_gemma_4_that_sees(tiny_of: TinyOf, tmp_path: Path) -> None:
    """Published checkpoints also have keys and values that no layer reads."""
    text = tiny_of("Gemma4Text")
    both = shutil.copytree(text, tmp_path / "both")
    config = config_of(text)
    edit_json(both / "config.json", architectures=["Gemma4ForConditionalGeneration"], text_config=config)
    with edited_tensors(both) as tensors:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.vision_tower.x.weight"] = torch.zeros(2)
        tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.zeros(2)
    requests = [request_of(i, range(5, 50 + i), max_tokens=5) for i in range(2)]
    found = [tokens_of(load(path, num_blocks=16), requests) for path in (text, both)]
    assert found[0] == found[1]
