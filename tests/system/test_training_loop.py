"""A trainer and a cluster on one machine: rollouts, a few steps of torch, new weights, and again. The log
probabilities of each rollout are those that the trainer computes with the same weights."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import new_session
from baton.weights import Weights

from .recovery import PATIENT

pytestmark = pytest.mark.all

CHANGES, STEPS, TOKENS = 5, 3, 24
TIMES_NOISE = 10.0
"""A worker adds in another order than transformers. So it may be off from float64 by some times as much as
the trainer's own float32 is."""
FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--advanced.num-threads", "1", "--advanced.num-blocks", "200",
    "--max-num-batched-tokens", "64", "--enable-prefix-caching",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shallow model as a Hugging Face directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("base")
    given = {"gguf_file": shallow_model_path.name}
    read: Any = AutoModelForCausalLM.from_pretrained(shallow_model_path.parent, dtype=torch.float32, **given)
    del read.config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(shallow_model_path.parent, **given)
    tokenizer.save_pretrained(directory)
    return directory


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of the tokens, after the prompt and those before."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(tokens)), tokens]


async def rollouts(url: str, prompts: list[list[int]]) -> list[tuple[list[int], list[float], Any]]:
    """For each prompt the tokens, their log probabilities, and the usage."""

    async def one(http: Any, seed: int, prompt: list[int]) -> tuple[list[int], list[float], Any]:
        asked = {
            "prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with http.post(url + "/v1/completions", json=asked) as response:
            answer = await response.json()
            assert response.status == 200, answer
        [choice] = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], answer["usage"]

    async with new_session() as http:
        return await asyncio.gather(*(one(http, seed, prompt) for seed, prompt in enumerate(prompts)))


@pytest.mark.long
@pytest.mark.parametrize("memory", ["shm", "memfd"])
async def test_rollouts_are_those_of_the_trainer(base: Path, memory: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prompts = [torch.randint(3, 8000, (length,)).tolist() for length in (80, 17, 150, 65)]
    served = ["--model", str(base)]
    with LocalCluster(
        tmp_path,
        prefill=1,
        decode=1,
        worker_flags=[*FLAGS, *served],
        router_flags=[*PATIENT, *served, "--advanced.admin-key", "trainer"],
    ) as cluster:
        place = tmp_path if memory == "memfd" else None
        with Weights(cluster.url, "trainer", base, memory=memory, directory=place) as weights:
            version, before = None, None
            for change in range(CHANGES + 1):
                found = await rollouts(cluster.url, prompts)
                noise, off, changed = 0.0, 0.0, 0.0
                exact = copy.deepcopy(model).double()
                for prompt, (tokens, told, usage) in zip(prompts, found, strict=True):
                    with torch.no_grad():
                        wanted, own = (logprobs(each, prompt, tokens) for each in (exact, model))
                        noise = max(noise, float((own - wanted).abs().max()))
                        off = max(off, float((torch.tensor(told) - wanted).abs().max()))
                        if before is not None:
                            old = logprobs(before, prompt, tokens)
                            changed = max(changed, float((old - wanted).abs().max()))
                    assert usage.get("weights_version", {}).get("last") == version
                assert off < TIMES_NOISE * noise
                assert before is None or changed > 10 * TIMES_NOISE * noise, "training changes the model"
                if change == CHANGES:
                    break
                before = copy.deepcopy(model)
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    text = torch.randint(3, 8000, (64,)).tolist()  # what it learns makes no rollout certain
                    (-logprobs(model, text[:1], text[1:]).mean()).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()

                def update(label: str = str(change)) -> str:
                    with weights.paused("keep"):
                        return weights.update(model.state_dict(), version=label)

                version = await asyncio.to_thread(update)
                assert version.startswith(f"{change}-")
