"""Each kind of cache that vLLM registers is handed over: tokens are those of one vLLM.

`bench/gpu.sh vllm_kinds` runs this with vLLM for CUDA, both workers on one GPU. vLLM's build for CPUs
computes only some of the kinds; a test of these runs there by its name.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.device import DEVICE
from tests.engine.conftest import save_tiny
from tests.vllm_worker.engines import prompts_of
from tests.vllm_worker.served import Front, VLLMCluster, routed, save_tokenizer
from tests.vllm_worker.test_images import Seeing, messages_of, picture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ON_CUDA = DEVICE == "cuda"
TOKENS = 12
TIE = 0.1
"""Nats. Sums in bfloat16 depend on how a prompt is cut, and may order tokens otherwise that are so close."""
SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64,
    "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
"""The sizes that vLLM's kernels read."""
LENGTHS = (1, 3, 64, 129, 300)
LIMITS = (
    "--max-model-len", "2048", "--advanced.num-blocks", "200", "--max-num-batched-tokens", "256",
    "--max-num-seqs", "4", "--no-enable-prefix-caching",
)  # fmt: skip
ON_GPU = ("--device", "cuda", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.05")
EAGER = "--enforce-eager"
CACHED = "--enable-prefix-caching", "--max-num-batched-tokens", "2048"
"""vLLM's blocks are then as large as the states of a layer, and no chunk is smaller."""
LONG = (1, 300, 700, 1500)
GRAPHS = """--compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'"""
"""Of steps that only decode. vLLM takes one for any step with one token of each request."""
CPU_LATENTS = """ --attention-backend CPU_MLA --compilation-config '{"custom_ops": ["-rotary_embedding"]}'"""


def tiny(kind: str, **changes: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        save_tiny(path, kind, **SIZES | changes)

    return save


def sparse(path: Path) -> None:
    """The indexer chooses all keys. Of more keys vLLM chooses others in each of two equal calls, also without
    a handover (vLLM #54521, #55122): on an H200 one answer differed from its first token on."""
    index = {"index_topk": 512, "index_head_dim": 128, "index_n_heads": 64}
    tiny("DeepseekV32", **LATENT, q_lora_rank=256, first_k_dense_replace=3, **index)(path)


def mamba1(path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    names = "vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "max_position_embeddings"
    sizes = {name: SIZES[name] for name in names}
    config = transformers.MambaConfig(**sizes, num_hidden_layers=3, initializer_range=0.1)
    transformers.MambaForCausalLM(config).save_pretrained(path)


def mamba2(path: Path) -> None:
    sizes = {"mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
    tiny("GraniteMoeHybrid", **sizes, num_local_experts=0)(path)


def kda(path: Path) -> None:
    """In the words and names of published checkpoints, which transformers does not write."""
    layers = ["linear_attention", "full_attention", "linear_attention"]
    tiny("KimiLinear", **LATENT, linear_head_dim=128, mlp_layer_types=["dense"] * 3, layer_types=layers)(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name in [
        name for name in config if "expert" in name or name.startswith(("linear_", "mlp_", "layer_"))
    ]:
        del config[name]
    linear = {"num_heads": 4, "head_dim": 128, "short_conv_kernel_size": 4}
    config |= {"linear_attn_config": linear | {"kda_layers": [1, 3], "full_attn_layers": [2]}}
    config |= {"mla_use_nope": True, "first_k_dense_replace": 3}
    file.write_text(json.dumps(config))
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    save_file(renamed, weights, {"format": "pt"})


def gdn(path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    tiny("Qwen3_5", **heads, rope_parameters=rope)(path)


GDN, TRITON = ("--language-model-only",), "--gdn-prefill-backend triton"


@dataclass(frozen=True)
class Kind:
    save: Callable[[Path], object]
    flags: tuple[str, ...] = ()
    vllm: str = ""
    """More of --vllm-args."""
    lengths: tuple[int, ...] = LENGTHS
    on_cpu: str | None = None
    """More of --vllm-args there. None: vLLM for CPUs cannot compute it."""
    graphs: bool = False


KINDS: Mapping[str, Kind] = {
    "attention": Kind(tiny("Llama"), on_cpu=""),
    "windows": Kind(tiny("Gemma3Text", sliding_window=48), ("--advanced.block-size", "32"), on_cpu=""),
    "latents": Kind(
        tiny("DeepseekV3", **LATENT, q_lora_rank=64, first_k_dense_replace=3), on_cpu=CPU_LATENTS
    ),
    "sparse": Kind(sparse, lengths=(3, 64, 300, 500)),
    "mamba1": Kind(mamba1),
    "mamba2": Kind(mamba2, on_cpu=""),
    "gdn": Kind(gdn, GDN, TRITON),
    "kda": Kind(kda),
    "mamba2_graphs": Kind(mamba2, graphs=True),
    "gdn_graphs": Kind(gdn, GDN, TRITON, graphs=True),
    "mamba2_cached": Kind(mamba2, CACHED, lengths=LONG, on_cpu=""),
    "gdn_cached": Kind(gdn, (*GDN, *CACHED), TRITON, lengths=LONG),
}


@contextlib.contextmanager
def started(model: Path, directory: Path, kind: Kind, *, sees: bool = False) -> Iterator[VLLMCluster]:
    """A cluster that is ready. If it fails, the first line says the cause by its logs."""
    steps = GRAPHS if kind.graphs else EAGER
    more = f"{steps} --kv-cache-memory-bytes {1 << 28} {kind.vllm}" if ON_CUDA else f"{steps} {kind.on_cpu}"
    flags = (*LIMITS, *kind.flags, *(ON_GPU if ON_CUDA else ()), "--vllm-args", more)
    cluster, failed = VLLMCluster(model, directory, *flags, fresh=ON_CUDA, sees=sees), ""
    try:
        cluster.until_ready()
        yield cluster
        cluster.stop()
    except (AssertionError, OSError) as error:
        failed = f"{type(error).__name__}: {error}"
    finally:
        cluster.kill()
    if failed:
        logs = "\n".join(log.read_text() for log in sorted(cluster.logs.glob("*.log"), reverse=True))
        first = "; ".join([*causes(logs)[-1:], failed.partition("\n")[0]])
        raise pytest.fail.Exception("\n".join([first, failed, logs]), pytrace=False) from None


def causes(logs: str) -> list[str]:
    """Errors that no other error has caused. vLLM also logs which optional modules it does not find."""
    found, end = [], 0
    for error in re.finditer(r"(?m)^(\w+(?:Error|Exception)): (?!.*See root cause above).*", logs):
        before, end = logs[end : error.start()], error.end()
        optional = error[1] in ("ImportError", "ModuleNotFoundError")
        if not optional and "direct cause of the following exception" not in before:
            found.append(error[0])
    return found


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    texts: list[str]
    likely: list[dict[str, float]]
    """Of each token: log probabilities of the most likely ones, by text."""


def answer(front: Front, prompt: list[int]) -> Answer:
    choice = front.ask(prompt=prompt, max_tokens=TOKENS, logprobs=5)
    found = choice["logprobs"]
    return Answer(choice["token_ids"], found["tokens"], found["top_logprobs"])


def answer_about(front: Front, *parts: Any) -> Answer:
    said = front.chat(messages=messages_of(*parts), max_tokens=TOKENS, logprobs=True, top_logprobs=5)
    choice = said["choices"][0]
    content = choice["logprobs"]["content"]
    likely = [{each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in content]
    return Answer(choice["token_ids"], [token["token"] for token in content], likely)


def compare(alone: list[Answer], handed: list[Answer], how: str) -> None:
    """Answers are equal up to a tie, and most of them are to the end."""
    equal = 0
    for i, (one, other) in enumerate(zip(alone, handed, strict=True)):
        assert len(one.tokens) == len(other.tokens) == TOKENS
        same = [x == y for x, y in zip(one.tokens, other.tokens, strict=True)]
        if all(same):
            equal += 1
            continue
        first = same.index(False)
        likely = one.likely[first]
        missed = max(likely.values()) - likely.get(other.texts[first], -float("inf"))
        assert missed < TIE, f"prompt {i}, token {first}: {one.tokens} alone, {other.tokens} {how}"
    assert 2 * equal > len(alone), f"{equal} of {len(alone)} answers are equal"
    assert len({tuple(each.tokens) for each in alone}) == len(alone), "answers depend on the prompts"
    print(f"{equal} of {len(alone)} answers {how} are equal to the end, others to a tie of {TIE} nats")


def hand_over(cluster: VLLMCluster, ask: Callable[[Front, int], Answer], count: int) -> None:
    """The decode worker alone answers `count` questions twice, and then with the KV of the prefill worker:
    one by one and at once. The order changes, since each finds what the last one has left in its blocks."""

    def computed() -> tuple[int, int]:
        status = cluster.workers()["decode"]["status"]
        return status["computed_prompt_tokens"], status["images_encoded"]

    with routed(cluster, cluster.workers()["decode"]["address"]) as front:
        alone = [ask(front, i) for i in reversed(range(count))][::-1]
        compare(alone, [ask(front, i) for i in range(count)], "alone, a second time,")
        front.assert_whole()
    before = computed()
    assert before[0] > 0, "it has computed the prompts"
    compare(alone, [ask(cluster, i) for i in range(count)], "handed over")
    with ThreadPoolExecutor() as pool:
        compare(alone, [*pool.map(lambda i: ask(cluster, i), range(count))], "handed over at once")
    assert computed() == before, "all KV was handed over"
    cluster.assert_whole()


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_one_vllm(name: str, tmp_path: Path) -> None:
    kind, model = KINDS[name], tmp_path / "model"
    if not ON_CUDA and kind.on_cpu is None:
        pytest.skip("vLLM for CPUs cannot compute it")
    kind.save(model)
    save_tokenizer(model, SIZES["vocab_size"])
    prompts = prompts_of([*kind.lengths], 5)
    with started(model, tmp_path, kind) as cluster:
        hand_over(cluster, lambda front, i: answer(front, prompts[i]), len(prompts))


def test_tokens_after_images_are_those_of_one_vllm(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    Seeing(model)
    first, second = picture(1), picture(2, 21, 30)
    asked = [("Look:", first), ("Look:", second, "and"), ("Say", first, "then", second, "?"), ("Say", "more")]
    kind = Kind(
        Seeing,
        ("--advanced.max-images", "20", "--max-model-len", "512"),
        "--mm-encoder-attn-backend TORCH_SDPA",
        on_cpu="",
    )
    with started(model, tmp_path, kind, sees=not ON_CUDA) as cluster:
        hand_over(cluster, lambda front, i: answer_about(front, *asked[i]), len(asked))
