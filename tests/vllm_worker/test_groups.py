"""Workers with vLLM hand over models whose layers are in several groups: with windows, and with states."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.bench.lab.harness.workers import metric
from baton.vllm_worker.attachment import Pool
from baton.vllm_worker.caches import pool_of
from baton.vllm_worker.metadata import BlockTable
from tests.engine.conftest import save_tiny
from tests.vllm_worker.engines import TOKENS, generated, prompts_of
from tests.vllm_worker.groups import attention, group
from tests.vllm_worker.served import VLLMCluster, save_tokenizer, serving

pytestmark = pytest.mark.all

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "max_position_embeddings": 2048, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip
KEEPS_ALL = "--prefix-cache-retention-interval 64"
"""By default vLLM 0.32 caches windows and states at the end of a prompt alone."""
LENGTHS = [1, 3, 31, 32, 33, 64, 127, 128, 129, 300]


def states(path: Path) -> tuple[str, ...]:
    save_tiny(path, "GraniteMoeHybrid", **SIZES, mamba_n_heads=16)
    return ()


def windows(path: Path) -> tuple[str, ...]:
    save_tiny(path, "Gemma3Text", **SIZES, head_dim=32, sliding_window=48, initializer_range=0.1)
    return ("--advanced.block-size", "32")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("save", [states, windows], ids=lambda save: save.__name__)
def test_tokens_are_those_of_transformers(save: Callable[[Path], tuple[str, ...]], tmp_path: Path) -> None:
    """A decode worker computes nothing of a prompt. The second time the first blocks are cached. All come at
    once: a model with states gave wrong tokens then, with another connector (vLLM #52627, cause open)."""
    model = tmp_path / "model"
    options = save(model)
    save_tokenizer(model, SIZES["vocab_size"])
    limits = "--max-model-len", "512", "--advanced.num-blocks", "300"
    cluster = VLLMCluster(model, tmp_path, *limits, *options)
    prompts = prompts_of(LENGTHS, 5)
    expected = generated(model, prompts)
    try:
        cluster.until_ready()
        with ThreadPoolExecutor() as pool:
            for _ in range(2):
                answers = pool.map(lambda x: cluster.ask(prompt=x, max_tokens=TOKENS), prompts)
                assert [answer["token_ids"] for answer in answers] == expected
        computed = {role: x["status"]["computed_prompt_tokens"] for role, x in cluster.workers().items()}
        assert computed["decode"] == 0, "all was handed over"
        cluster.until_cached("prefill", prompts[-1], 256)
        cluster.stop()
    finally:
        cluster.kill()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("save", [states, windows], ids=lambda save: save.__name__)
def test_a_prefix_comes_from_the_worker_that_has_it(
    save: Callable[[Path], tuple[str, ...]], tmp_path: Path
) -> None:
    """The prefill worker gets the answer with its windows and states from the decode worker. It computes the
    rest. Each chat is another one, if this router has not heard of the answer yet."""
    model = tmp_path / "model"
    options = *save(model), "--advanced.block-size", "64", "--vllm-args", f"--enforce-eager {KEEPS_ALL}"
    save_tokenizer(model, SIZES["vocab_size"])
    with serving(
        model, tmp_path, "--max-model-len", "512", "--advanced.num-blocks", "300", *options
    ) as cluster:
        address = cluster.workers()["prefill"]["description"]["metrics_address"]
        fetched = 0.0
        for prompt in prompts_of([300] * 5, 13):
            answer = cluster.ask(prompt=prompt, max_tokens=100)["token_ids"]
            turn = [*prompt, *answer, *prompt[:80]]
            for role, tokens in (("prefill", 256), ("decode", 384)):
                cluster.until_cached(role, turn, tokens)
            [expected] = generated(model, [turn])
            assert cluster.ask(prompt=turn, max_tokens=TOKENS)["token_ids"] == expected
            cluster.assert_whole()
            if fetched := metric(f"http://{address}", "baton:prefix_fetched_tokens_total"):
                break
        assert fetched == 128


def test_a_pool_is_shared_by_all_groups() -> None:
    """32 tokens take 1 block of vLLM in one group, and 2 in another. A request has at most 3 blocks
    within a window, and 2 of states."""
    full = [attention("layers.0", block=size, heads=1, dim=8) for size in (32, 16)]
    more = {"block": 16, "heads": 1, "dim": 8}
    window = attention("layers.1", **more, kind="SlidingWindowSpec", sliding_window=20)
    of_states = group("MambaSpec", "layers.2", block_size=64, shapes=((8,),), dtypes=())
    assert pool_of([full[0]], 600) == Pool(32, 600, tables=(BlockTable(32),))
    assert pool_of([*full, window, of_states], 600) == Pool(32, 200, 3, ((16, 3), (64, 2)))
    assert pool_of([of_states, full[0]], 600).complete == 1
    assert pool_of([window, window], 600) == Pool(16, 600, 1, ((16, 3),))


def test_prefixes_move_if_a_group_keeps_all_tokens_in_blocks_that_fit_chunks() -> None:
    more: dict[str, Any] = {"heads": 1, "dim": 8}
    window = attention("layers.1", block=16, **more, kind="SlidingWindowSpec", sliding_window=20)
    full = {size: attention("layers.0", block=size, **more) for size in (16, 48, 128)}
    assert [pool_of([each], 600).tables for each in full.values()] == [
        (BlockTable(16),),
        (),
        (BlockTable(128),),
    ]
    assert not pool_of([window], 600).tables
    assert pool_of([full[16], full[16]], 600).tables
    states = {
        size: group("MambaSpec", "layers.2", block_size=size, shapes=((8,),), dtypes=()) for size in (16, 64)
    }
    assert pool_of([full[16], window, states[16]], 600).tables
    assert not pool_of([full[16], states[64]], 600).tables
