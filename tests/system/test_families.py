"""Mixtures of experts, hybrid models and those with latents in a cluster: its tokens are transformers'."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import cases, expected
from tests.engine.conftest import save_spelled_tokenizer, save_tiny
from tests.engine.test_models import scores

from .pair import served
from .recovery import FLAGS, Broken, each_has, wait_exit

pytestmark = pytest.mark.long

TOKENS = 12
FAMILIES = (
    "Qwen3Moe",
    "Llama4",
    "GptOss",
    "Bamba",
    "GraniteMoeHybrid",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Lfm2",
    "MiMoV2Flash",
    "MiniMaxM2",
    "NemotronH",
    "Step3p7",
    "Gemma4Text",
)
LATENTS = "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "KimiLinear", "DeepseekV32", "GlmMoeDsa"


@pytest.mark.parametrize("kind", [*FAMILIES, *LATENTS])
async def test_a_client_reads_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    """From shards, in float32; prompts of several chunks, and longer than an attention chunk."""
    model = tmp_path / "model"
    reference = save_tiny(model, kind)
    reference.save_pretrained(model, max_shard_size="200KB")
    save_spelled_tokenizer(model)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 31, 40, 150)]
    async with served(tmp_path, model, TOKENS) as ask:
        got = await asyncio.gather(*map(ask, prompts))
    for prompt, tokens in zip(prompts, got, strict=True):
        assert len(tokens) == TOKENS
        assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist(), f"{len(prompt)} tokens"


NARROW = "--advanced.state-dtype", "bfloat16"


@pytest.mark.parametrize(("prefill", "decode"), [((), NARROW), (NARROW, ())], ids=["narrower", "wider"])
async def test_states_of_two_dtypes_in_one_cluster(
    prefill: tuple[str, ...], decode: tuple[str, ...], tmp_path: Path
) -> None:
    """The router takes both, and each prompt is handed over. A token may be another one than in float32 only
    if both are about as probable."""
    model = tmp_path / "model"
    reference = save_tiny(model, "Bamba")
    save_spelled_tokenizer(model)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 40, 150)]
    async with served(tmp_path, model, TOKENS, prefill=prefill, decode=decode) as ask:
        got = await asyncio.gather(*map(ask, prompts))
    for prompt, tokens in zip(prompts, got, strict=True):
        rows = scores(reference, prompt, tokens)
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (rows.amax(-1) - chosen).max() < 0.3, f"{len(prompt)} tokens"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("DeepseekV3", ()),
        ("GlmMoeDsa", ()),
        ("KimiLinear", ()),
        ("Qwen3_5Text", ()),
        ("Bamba", (*NARROW, "--batch-invariant")),
    ],
)
async def test_streams_outlive_each_process_of_workers(
    kind: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Of models with latents and with states. Those in 16 bits are rounded after each token in the exact
    mode, so a stream that goes on elsewhere has the same."""
    model = tmp_path / "model"
    save_tiny(model, kind, max_position_embeddings=4096)
    save_spelled_tokenizer(model)
    named = ["--model", str(model), "--served-model-name", kind]
    with LocalCluster(
        tmp_path, worker_flags=[*FLAGS, *named, *flags], router_flags=["--advanced.no-overflow", *named]
    ) as cluster:
        asked = cases(6, 60, repeat=5)
        broken = Broken(cluster, await expected(cluster.url, asked))
        for kind in ("engine", "transfer", "service"):
            for role, moment in (("prefill", broken.transferring), ("decode", each_has(3))):

                def strike(kind: str = kind, role: str = role) -> None:
                    victim = broken.busiest(role)
                    exits = len(victim.exits)
                    victim.kill(kind)
                    wait_exit(victim, exits + 1)

                await broken.ride(asked, (moment, strike), felt=broken.retries)
                await broken.settled()
