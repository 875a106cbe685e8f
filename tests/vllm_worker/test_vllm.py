"""Two real vLLM engines with the connector give the tokens of one vLLM, and of transformers.

They stand behind a proxy that was made for vLLM's NixlConnector: the test sends what it sends."""

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_worker.engines import GREEDY, Answers, Server, generated, prompts_of, save_model

pytestmark = pytest.mark.all

PREFILL: dict[str, Any] = {"do_remote_decode": True}


class Servers:
    def __init__(self, model: Path, policy: str, ranks: tuple[int, int] = (1, 1), **options: Any) -> None:
        """`ranks`: of the prefill server, and of the decode server."""

        def server(role: str, size: int) -> Server:
            connector = {"kv_role": role, "kv_load_failure_policy": policy}
            return Server(model, kv_transfer_config=connector, tensor_parallel_size=size, **options)

        self.model = model
        self.prefill, self.decode = server("kv_producer", ranks[0]), server("kv_consumer", ranks[1])

    def prefilled(self, prompts: list[list[int]]) -> Answers:
        return self.prefill.answers([(prompt, GREEDY | {"max_tokens": 1}, PREFILL) for prompt in prompts])

    def decoded(self, prompts: list[list[int]], prefilled: Answers) -> list[list[int]]:
        """As a proxy that was made for NixlConnector: with the parameters that the prefill server gave."""
        requests = [(prompt, GREEDY, params) for prompt, (_, params) in zip(prompts, prefilled, strict=True)]
        return [tokens for tokens, _ in self.decode.answers(requests)]


@contextlib.contextmanager
def started(model: Path, policy: str, ranks: tuple[int, int] = (1, 1), **options: Any) -> Iterator[Servers]:
    pair = Servers(model, policy, ranks, **options)
    servers = (pair.prefill, pair.decode)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.line, servers))
        yield pair
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with started(save_model(tmp_path_factory.mktemp("vllm")), "recompute") as pair:
        yield pair


MANY = [random.Random(0).randrange(3, 2000) for _ in range(26)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "lengths",
    [[3, 128, 129, 300, 700], pytest.param([3, 127, 1500, 2000, *MANY], marks=pytest.mark.long)],
    ids=["five", "thirty"],
)
def test_tokens_are_those_of_one_engine(servers: Servers, lengths: list[int]) -> None:
    """Long prompts are computed in chunks. Two prompts begin with the same block, which their step computes.
    The second time both servers have the first blocks in their prefix caches."""
    prompts = prompts_of(lengths, len(lengths))
    block, *ends = prompts_of([128, 1, 60], 7)
    prompts = [*(block + end for end in ends), *prompts]
    expected = generated(servers.model, prompts)
    for _ in range(2):
        prefilled = servers.prefilled(prompts)
        assert [tokens for tokens, _ in prefilled] == [tokens[:1] for tokens in expected]
        assert servers.decoded(prompts, prefilled) == expected
    alone = servers.prefill.answers([(prompt, GREEDY, None) for prompt in prompts])
    assert [tokens for tokens, _ in alone] == expected


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_servers_of_several_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """A server has one address for all of its ranks. Both may have other numbers of them."""
    prompts = prompts_of([3, 128, 129, 300, 700], 5)
    with started(save_model(tmp_path), "fail", ranks) as servers:
        expected = generated(tmp_path, prompts)
        for _ in range(2):  # then from prefix caches
            held = servers.prefilled(prompts)
            assert servers.decoded(prompts, held) == expected
        assert servers.decode.cached


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [1, 2])
def test_layers_with_windows_beside_others(tmp_path: Path, groups: int) -> None:
    """vLLM keeps all KV of such layers, as of the others, or frees their blocks behind the window."""
    layers = ["sliding_attention", "full_attention"] * 2
    save_model(tmp_path, "Olmo3", num_hidden_layers=4, layer_types=layers, sliding_window=64)
    prompts, options = prompts_of([3, 63, 64, 65, 300], 3), {"disable_hybrid_kv_cache_manager": groups == 1}
    with started(tmp_path, "fail", block_size=32, **options) as servers:
        expected = generated(tmp_path, prompts)
        for _ in range(2):  # then from prefix caches
            assert servers.decoded(prompts, servers.prefilled(prompts)) == expected


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cached", "ranks"), [(False, 1), (True, 1), (True, 2)])
def test_states_are_those_before_the_last_position(tmp_path: Path, cached: bool, ranks: int) -> None:
    """The decode server computes it again, and has no KV of the last prompts. Then it computes all of them.
    Blocks begin with NaN, as blocks of states may have it where another layer reads them as KV."""
    from tests.engine.conftest import save_tiny

    beginning, *ends = prompts_of([384, 1, 60, 128, 129], 7)
    prompts = prompts_of([1, 2, 3, 63, 64, 65, 128, 129, 300], 3) + [beginning + end for end in ends]
    sizes = {"vocab_size": 500, "hidden_size": 128, "max_position_embeddings": 2048, "mamba_n_heads": 16}
    save_tiny(tmp_path, "GraniteMoeHybrid", **sizes, bos_token_id=None, eos_token_id=0)
    with started(tmp_path, "recompute", (ranks, ranks), enable_prefix_caching=cached, states=True) as servers:
        expected = generated(tmp_path, prompts)
        for _ in range(2):  # then from prefix caches
            held = servers.prefilled(prompts)
            assert servers.decoded(prompts, held) == expected
        alone = servers.prefill.answers([(prompt, GREEDY, None) for prompt in prompts])
        assert [tokens for tokens, _ in alone] == expected
        assert (servers.prefill.cached > 0) == cached
        assert (servers.decode.cached > 0) == cached
        held = servers.prefilled(prompts)
        servers.prefill.kill()
        assert servers.decoded(prompts, held) == expected


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "scheduled ahead"])
def test_model_runner_v2_computes_a_prompt_whose_kv_does_not_come(tmp_path: Path, ahead: bool) -> None:
    """It goes on at a wrong position after a load that fails within a step (vLLM #49250). The connector's
    loads end before the first step of their request. Others decode meanwhile."""
    prompts = prompts_of([40, 200], 9)
    options = {"v2": True, "async_scheduling": ahead, "enable_prefix_caching": False}
    with started(save_model(tmp_path), "recompute", **options) as servers:
        prefilled = servers.prefilled(prompts)
        servers.prefill.kill()
        both = [*prefilled, *[(tokens, None) for tokens, _ in prefilled]]
        assert servers.decoded([*prompts, *prompts], both) == generated(servers.model, prompts) * 2


@pytest.mark.timeout(600)
def test_a_prompt_whose_prefill_server_was_killed_is_computed(servers: Servers) -> None:
    """The last test of this module: the server is not started again."""
    prompts = prompts_of([40, 200], 9)
    prefilled = servers.prefilled(prompts)
    servers.prefill.kill()
    assert servers.decoded(prompts, prefilled) == generated(servers.model, prompts)
