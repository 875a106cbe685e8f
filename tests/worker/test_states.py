"""Workers with models that have state layers or latents: they hand over what these keep of a request."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from baton.rpc import worker_pb2 as pb
from tests import ledger
from tests.bad_network import BadNetwork
from tests.cluster_helpers import (
    Pair,
    assert_whole,
    attached,
    metrics,
    request,
    sampling,
    side_by_side,
    tiny_model,
)
from tests.engine.checkpoints import edit_json
from tests.engine.conftest import TINY_LATENT, TINY_SPARSE

pytestmark = pytest.mark.all

KV, STATE = 0, 1
"""Arrays of a frame."""
HYBRID = {
    "architectures": ["BambaForCausalLM"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
}
NARROW = {"mamba_ssm_dtype": "bfloat16"}
LATENTS = {
    **TINY_LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
}


SPARSE = {**TINY_SPARSE, "architectures": ["DeepseekV32ForCausalLM"], "hidden_act": "silu"}
LEDGER = {"architectures": [ledger.NAME], "num_hidden_layers": 3}
WITH_LEDGER = {"engine_module": "tests.ledger_engine"}


@pytest.mark.parametrize(
    ("changes", "arrays", "more"),
    [
        pytest.param(HYBRID, (STATE,), {}, id="states"),
        pytest.param(LATENTS, (KV,), {}, id="latents"),
        pytest.param(SPARSE, (1,), {}, id="an index"),
        pytest.param(LEDGER, (2, 3), WITH_LEDGER, id="arrays of tests, of tokens and of requests"),
    ],
)
async def test_a_request_survives_damage_and_the_death_of_a_prefill_worker(
    changes: dict[str, Any], arrays: Sequence[int], more: dict[str, Any], tmp_path: Path
) -> None:
    """A worker has one slot for states, so a slot that is not freed fails the next request."""
    model = tiny_model(tmp_path / "kind")
    edit_json(model / "config.json", **changes)
    engine = {"load_format": "dummy", "num_blocks": 64, "max_num_seqs": 1, "max_num_batched_tokens": 32}
    engine |= {"enable_prefix_caching": True}
    settings = {"model": model, "engine": engine, "kv_connector": "tcp", **more}
    roles = {"prefill": "prefill", "other prefill": "prefill", "decode": "decode"}
    prompt, params = range(100, 170), sampling(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
    asked = request(prompt, params)
    with side_by_side(
        tmp_path, {name: {"role": role, **settings} for name, role in roles.items()}
    ) as workers:
        prefill, other, decode = (workers[name].wait_ready() for name in roles)
        async with attached(prefill) as p, attached(other) as q, attached(decode) as d:
            expected = [token.token_id for token, _ in await d.tokens(await d.reserve(asked))]
            assert len(set(expected)) > 2
            with closing(BadNetwork(int(prefill.ready["kv_address"].rpartition(":")[2]))) as network:
                pair = Pair(p, d, network.address, prefill.ready["incarnation"])
                for count, network.kind in enumerate(arrays, 1):
                    network.fault, network.hits = "corrupt", 1
                    assert (await pair.generate(prompt, params)).tokens == expected
                    assert network.suffered == count
                    await assert_whole(prefill, decode)
                    assert metrics(decode)['baton:kv_checksum_failures_total{kind="payload"}'] == count

                network.fault, network.hits = "half-open", 1
                _, decode_id = await pair.submit(asked)
                await d.reserved(decode_id)
                prefill.popen.kill()
            pair = Pair(q, d, other.ready["kv_address"], other.ready["incarnation"])
            again = await q.submit_prefill(asked, handover=True)
            await d.send(retarget=pb.Retarget(decode_id=decode_id, source=pair.source(again)))
            assert [token.token_id for token, _ in await d.tokens(decode_id)] == expected
            longer = await pair.generate(prompt, params, expected[:3])
            assert longer.tokens == expected[3:]
            await assert_whole(other, decode)


@pytest.mark.parametrize(
    ("changes", "more", "length", "answer", "cached"),
    [
        pytest.param(HYBRID, {}, 650, 8, 640, id="states"),
        pytest.param(HYBRID, {}, 300, 90, 384, id="states of an answer"),
        pytest.param(HYBRID | NARROW, {}, 300, 90, 384, id="states in bfloat16"),
        pytest.param(LEDGER, WITH_LEDGER, 300, 90, 384, id="arrays of tests"),
    ],
)
async def test_a_prefix_comes_from_another_worker_with_its_states(
    changes: dict[str, Any], more: dict[str, Any], length: int, answer: int, cached: int, tmp_path: Path
) -> None:
    """They are those at the end of the prompt, or at the end of the answer."""
    model = tiny_model(tmp_path / "kind")
    edit_json(model / "config.json", **changes)
    engine = {"load_format": "dummy", "num_blocks": 64, "block_size": 64, "enable_prefix_caching": True}
    given = {"role": "prefill", "model": model, "engine": engine, **more}
    with side_by_side(tmp_path, {0: given, 1: given}) as started:
        workers = [started[number].wait_ready() for number in (0, 1)]
        async with attached(workers[0]) as source, attached(workers[1]) as target:
            first = random.Random(3).choices(range(500), k=length)
            asked = request(first, sampling(max_tokens=answer, ignore_eos=True))
            tokens = [token.token_id for token, _ in await source.tokens(await source.reserve(asked))]
            longer = [*first, *tokens, *range(100, 150)]
            asked = request(longer, sampling(max_tokens=8, ignore_eos=True))
            ready = workers[0].ready
            content = pb.ContentSource(kv_address=ready["kv_address"], incarnation=ready["incarnation"])
            events = [token for token, _ in await target.tokens(await target.reserve(asked, content=content))]
            assert events[0].cached_tokens == cached
            alone = await source.tokens(await source.reserve(request(longer, asked.sampling)))
            assert [token.token_id for token in events] == [token.token_id for token, _ in alone]
            await assert_whole(*workers)


@pytest.mark.parametrize("kv_connector", ["tcp", "auto"])
async def test_states_are_converted_for_a_worker_that_keeps_another_dtype(
    kv_connector: str, tmp_path: Path
) -> None:
    """Both ways. The tokens are those of the worker that decodes, alone."""
    model = tiny_model(tmp_path / "kind")
    edit_json(model / "config.json", **HYBRID)
    engine = {"load_format": "dummy", "num_blocks": 64, "max_num_seqs": 2}
    given = {"role": "prefill", "model": model, "kv_connector": kv_connector}
    dtypes = ("float32", "bfloat16")
    prompt, params = range(100, 170), sampling(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
    asked = request(prompt, params)
    with side_by_side(
        tmp_path, {dtype: given | {"engine": engine | {"state_dtype": dtype}} for dtype in dtypes}
    ) as started:
        wide, narrow = (started[dtype].wait_ready() for dtype in dtypes)
        for worker, dtype in ((wide, "float32"), (narrow, "bfloat16")):
            assert any(f'mamba_ssm_cache_dtype="{dtype}"' in name for name in metrics(worker))
        async with attached(wide) as first, attached(narrow) as second:
            ways = (wide, first, narrow, second), (narrow, second, wide, first)
            for there, prefill, here, decode in ways:
                pair = Pair(prefill, decode, there.ready["kv_address"], there.ready["incarnation"])
                answer = await pair.generate(prompt, params)
                alone = await decode.tokens(await decode.reserve(asked))
                assert answer.tokens == [token.token_id for token, _ in alone]
                assert len(set(answer.tokens)) > 2
                await assert_whole(there, here)


async def test_memory_moves_on_both_sides_of_handovers(tmp_path: Path) -> None:
    """Many short requests need states, and then a few long ones KV: neither worker has memory for both."""
    model = tiny_model(tmp_path / "kind")
    edit_json(model / "config.json", **HYBRID)
    engine = {"load_format": "dummy", "num_blocks": None, "block_size": 16, "max_num_seqs": 24}
    engine |= {"enable_prefix_caching": True, "max_num_batched_tokens": 256}
    given = {
        "model": model,
        "engine": engine,
        "kv_connector": "auto",
        "engine_module": "tests.elastic_engine",
    }
    roles = ("prefill", "decode")
    rng = random.Random(4)
    with side_by_side(tmp_path, {role: {"role": role, **given} for role in roles}) as started:
        workers = [started[role].wait_ready() for role in roles]
        async with attached(workers[0]) as p, attached(workers[1]) as d:
            pair = Pair(p, d, workers[0].ready["kv_address"], workers[0].ready["incarnation"])
            for count, length in ((24, 20), (2, 900), (24, 20)):
                prompts = [rng.choices(range(500), k=length) for _ in range(count)]
                params = sampling(max_tokens=6, ignore_eos=True)
                answers = await asyncio.gather(*(pair.generate(prompt, params) for prompt in prompts))
                for prompt, answer in zip(prompts[:2], answers, strict=False):
                    alone = await d.tokens(await d.reserve(request(prompt, params)))
                    assert answer.tokens == [token.token_id for token, _ in alone]
                await assert_whole(*workers)
        for worker in workers:
            assert metrics(worker)["baton:elastic_memory_moved_bytes_total"] > 0
