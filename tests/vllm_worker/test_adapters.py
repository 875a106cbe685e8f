"""Adapters (LoRA) of real vLLM workers: tokens are those of transformers with merged weights."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.system.machine import until

from .served import Reference, VLLMCluster, prompts_of, save_model, serving

SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (128, 128), "mlp.down_proj": (128, 128),
}  # fmt: skip
LAYERS, RANK, ALPHA, TOKENS = 3, 4, 8, 12


def save_adapter(directory: Path, seed: int) -> Path:
    """Random matrices for the model of `served`, in PEFT's format."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for layer in range(LAYERS):
        for module, (out, inner) in SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inner) / 5
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK) / 5
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    modules = [module.partition(".")[2] for module in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(model: Path, adapter: Path) -> Reference:
    """The model with the adapter in its weights."""
    from safetensors.torch import load_file

    tensors, reference = load_file(adapter / "adapter_model.safetensors"), Reference(model)
    for layer in range(LAYERS):
        for module in SHAPES:
            name = f"base_model.model.model.layers.{layer}.{module}"
            added = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            weight = reference._model.model.layers[layer].get_submodule(module).weight
            weight.data += ALPHA / RANK * added
    return reference


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adapters")
    save_model(found / "model")
    save_adapter(found / "one", 1)
    save_adapter(found / "two", 2)
    (found / "key").write_text("of the administrator")
    return found


@pytest.fixture(scope="module")
def cluster(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMCluster]:
    with serving(
        directory / "model", tmp_path_factory.mktemp("served"),
        "--max-model-len", "2304", "--advanced.num-blocks", "100", "--max-num-batched-tokens", "256",
        "--lora-modules", f"one={directory / 'one'}", "--advanced.max-loras", "1",
        "--advanced.max-cpu-loras", "2", "--admin-key-file", str(directory / "key"),
    ) as served:  # fmt: skip
        yield served


def changed(cluster: VLLMCluster, call: str, **body: Any) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{cluster.url}/v1/{call}_lora_adapter",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer of the administrator"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def models(cluster: VLLMCluster) -> list[str]:
    with urllib.request.urlopen(f"{cluster.url}/v1/models") as response:
        return [card["id"] for card in json.load(response)["data"]]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tokens_are_those_of_merged_weights(cluster: VLLMCluster, directory: Path) -> None:
    """One prompt for each model in turn: nothing that another one has cached is used. A second adapter comes
    while the workers serve, a worker that starts again gets it, too, and a stream outlives its unloading."""
    model = directory / "model"
    references = {
        "tiny": Reference(model),
        "one": merged(model, directory / "one"),
        "two": merged(model, directory / "two"),
    }
    prompts = prompts_of([3, 130, 300], 5)
    expected = {
        name: [reference.tokens(prompt, TOKENS) for prompt in prompts]
        for name, reference in references.items()
    }
    assert expected["tiny"] != expected["one"] != expected["two"] != expected["tiny"]

    def check(*names: str) -> None:
        for name in names:
            for prompt, tokens in zip(prompts, expected[name], strict=True):
                assert cluster.ask(model=name, prompt=prompt, max_tokens=TOKENS)["token_ids"] == tokens

    def only_on_device(name: str) -> None:
        """Workers report that they have moved this adapter to their only slot."""

        def reported() -> bool:
            return all(
                [each["fingerprint"] for each in worker["description"]["adapters"] if each["name"] == name]
                == worker["status"].get("adapters_on_device")
                and worker["status"]["adapter_move_seconds"] > 0
                for worker in cluster.workers().values()
            )

        until(reported, 10.0, f"adapter {name} is on the device of all workers")

    def restarted() -> bool | None:
        worker = cluster.workers().get("decode")
        if worker is None or worker["state"] != "ready":
            return None
        assert [each["name"] for each in worker["description"]["adapters"]] == ["one", "two"]
        return True

    assert models(cluster) == ["tiny", "one"]
    only_on_device("one")
    check("tiny", "one", "tiny", "one")
    status, text = changed(cluster, "load", lora_name="two", lora_path=str(directory / "missing"))
    assert status == 400
    assert "there is no file" in text
    assert models(cluster) == ["tiny", "one"]
    assert changed(cluster, "load", lora_name="two", lora_path=str(directory / "two"))[0] == 200
    assert models(cluster) == ["tiny", "one", "two"]
    check("two", "one", "tiny")
    only_on_device("one")
    check("two")
    only_on_device("two")
    assert cluster.workers()["decode"]["status"]["computed_prompt_tokens"] == 0, "all KV was handed over"
    status, text = changed(cluster, "load", lora_name="three", lora_path=str(directory / "one"))
    assert status == 400
    assert "--advanced.max-cpu-loras" in text

    psutil.Process(cluster.process_of("decode 0 engine").pid).kill()
    cluster.until_restarted("decode 0", 1)
    until(restarted, 60.0, "the worker has both adapters")
    check("two", "one", "tiny")

    stream = cluster.stream(model="two", prompt=prompts[0], max_tokens=1000)
    first = next(stream)
    assert changed(cluster, "unload", lora_name="two")[0] == 200
    assert models(cluster) == ["tiny", "one"]
    assert changed(cluster, "unload", lora_name="two")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cluster.ask(model="two", prompt=prompts[0], max_tokens=1)
    tokens = [*first, *(token for tokens in stream for token in tokens)]
    assert tokens == references["two"].tokens(prompts[0], 1000)
    check("one", "tiny")
    assert changed(cluster, "load", lora_name="three", lora_path=str(directory / "two"))[0] == 200
    cluster.assert_whole()
