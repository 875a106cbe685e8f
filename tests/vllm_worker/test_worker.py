"""`baton serve --engine vllm`: streams are those of transformers, whatever process dies."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.bench.lab.harness.workers import metric
from tests.system.machine import until
from tests.within import WITHIN

from .served import Front, Reference, VLLMCluster, joined, prompts_of, save_model, serving

pytestmark = pytest.mark.all

TOKENS = 12
FLAGS = ("--max-model-len", "2304", "--advanced.num-blocks", "100", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMCluster]:
    with serving(model, tmp_path_factory.mktemp("served"), *FLAGS, measured=True) as served:
        yield served


def streamed(cluster: Front, **fields: Any) -> list[int]:
    return [token for tokens in cluster.stream(**fields) for token in tokens]


@pytest.mark.timeout(900)
def test_steps_are_measured_at_the_start(cluster: VLLMCluster) -> None:
    for role in ("prefill", "decode"):
        steps = until(lambda role=role: cluster.workers()[role]["status"]["step_model"], WITHIN, "a report")
        assert (steps["rows"], steps["tokens"]) == ([1, 2, 4, 8, 16, 32], [16, 32, 64, 128, 256])
        assert 0 < steps["decode_seconds"][0] <= steps["decode_seconds"][-1]


@pytest.mark.timeout(900)
def test_five_prompts(cluster: VLLMCluster, reference: Reference) -> None:
    """Chunked, with a prefix hit, and with what the router does: streams, stop strings, log probabilities."""
    short, middle, long, chunked, sampled = prompts_of([3, 40, 130, 300, 310], 5)
    again = [*long, 7, 8, 9]
    expected = {len(p): reference.tokens(p, TOKENS) for p in (short, middle, long, chunked, again)}

    assert streamed(cluster, prompt=short, max_tokens=TOKENS) == expected[3]
    choice = cluster.ask(prompt=middle, max_tokens=TOKENS, logprobs=2)
    assert choice["token_ids"] == expected[40]
    found, right = choice["logprobs"]["token_logprobs"], reference.logprobs(middle, expected[40])
    assert found == pytest.approx(right, abs=1e-3), "that of the first token, too"
    assert cluster.ask(prompt=long, max_tokens=TOKENS)["token_ids"] == expected[130]
    assert streamed(cluster, prompt=again, max_tokens=TOKENS) == expected[133]
    word = reference.text(expected[300][6:7])
    choice = cluster.ask(prompt=chunked, max_tokens=TOKENS, stop=[word])
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == reference.text(expected[300]).partition(word)[0]

    assert len(streamed(cluster, prompt=sampled, max_tokens=3, temperature=1)) == 3
    # Grammar and penalties see the first token as output.
    regex, five = "([AB]CD){4}", [*short, 5, 6]
    choice = cluster.ask(prompt=five, max_tokens=40, ignore_eos=False, structured_outputs={"regex": regex})
    assert re.fullmatch(regex, choice["text"])
    penalized = streamed(cluster, prompt=middle, max_tokens=TOKENS, presence_penalty=2.0)
    assert penalized == reference.penalized(middle, TOKENS, 2.0) != expected[40]

    for role in ("prefill", "decode"):
        cluster.until_cached(role, again, 128)
    computed = {
        role: worker["status"]["computed_prompt_tokens"] for role, worker in cluster.workers().items()
    }
    expected_counts = {"prefill": 3 + 40 + 130 + 5 + 300 + 310 + 5 + 40, "decode": 0}
    assert computed == expected_counts, "all KV was handed over"
    cluster.assert_whole()


@pytest.mark.timeout(900)
def test_a_prefix_comes_from_the_worker_that_has_it(cluster: VLLMCluster, reference: Reference) -> None:
    """The next turn of a chat: the prefill worker gets the answer from the decode worker's cache. In another
    chat, if this router has not heard of the answer yet."""
    address = cluster.workers()["prefill"]["description"]["metrics_address"]
    for prompt in prompts_of([300] * 5, 13):
        answer = streamed(cluster, prompt=prompt, max_tokens=300)
        turn = [*prompt, *answer, *prompt[:200]]
        for role, tokens in (("prefill", 256), ("decode", 512)):
            cluster.until_cached(role, turn, tokens)
        assert streamed(cluster, prompt=turn, max_tokens=TOKENS) == reference.tokens(turn, TOKENS)
        cluster.assert_whole()
        if fetched := metric(f"http://{address}", "baton:prefix_fetched_tokens_total"):
            break
    assert fetched == 256


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lengths",
    [
        [3, 300],
        pytest.param([3, 127, 128, 129, 2000, *(41 + 73 * i for i in range(25))], marks=pytest.mark.long),
    ],
    ids=["two", "thirty"],
)
def test_pairs_with_batons_engine(cluster: VLLMCluster, reference: Reference, lengths: list[int]) -> None:
    """Chunked prompts, all at once, and then one that begins as another. Log probabilities are those of one
    engine."""
    with (
        joined(cluster, "--max-model-len", "2304", "--advanced.num-blocks", "1000") as fronts,
        ThreadPoolExecutor(30) as pool,
    ):
        for seed, front in enumerate(fronts, 20):
            prompts = prompts_of(lengths, seed)
            again = [*max(prompts, key=len), 7, 8, 9]

            def ask(prompt: list[int], front: Front = front) -> dict[str, Any]:
                return front.ask(prompt=prompt, max_tokens=TOKENS, logprobs=2)

            for prompt, choice in zip([*prompts, again], [*pool.map(ask, prompts), ask(again)], strict=True):
                assert choice["token_ids"] == (right := reference.tokens(prompt, TOKENS))
                found = choice["logprobs"]["token_logprobs"]
                assert found == pytest.approx(reference.logprobs(prompt, right), abs=1e-3)
            computed = {
                role: worker["status"]["computed_prompt_tokens"] for role, worker in front.workers().items()
            }
            assert computed["decode"] == 0, "all KV was handed over"
            front.assert_whole()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "title",
    [
        "decode 0 engine::EngineCore",
        *(
            pytest.param(f"{role} 0{kind}", marks=pytest.mark.long)
            for role in ("decode", "prefill")
            for kind in (" engine", " engine::Worker", " transfer", "")
        ),
        pytest.param("prefill 0 engine::EngineCore", marks=pytest.mark.long),
    ],
)
def test_a_stream_goes_on_when_a_process_is_killed(
    cluster: VLLMCluster, reference: Reference, title: str
) -> None:
    [prompt] = prompts_of([60], 6)
    cluster.goes_on(reference.tokens(prompt, 200), title, prompt=prompt)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_drains_ends_its_streams(cluster: VLLMCluster, reference: Reference, role: str) -> None:
    [prompt] = prompts_of([200], 8)
    right = reference.tokens(prompt, 600)
    cluster.goes_on(right, f"{role} 0", psutil.Process.terminate, prompt=prompt)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_that_changed_their_pools(cluster: VLLMCluster, reference: Reference) -> None:
    """KV goes the other way. A flip interrupts nothing."""
    prompts = prompts_of([50, 300, 700], 9)
    right = [reference.tokens(prompt, 100) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        for flipped in (True, False):
            running = [pool.submit(streamed, cluster, prompt=prompt, max_tokens=100) for prompt in prompts]
            cluster.flip("prefill", "decode" if flipped else "prefill")
            cluster.flip("decode", "prefill" if flipped else "decode")
            running += [pool.submit(streamed, cluster, prompt=prompt, max_tokens=100) for prompt in prompts]
            assert [each.result() for each in running] == right * 2
    cluster.assert_whole()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_thirty_prompts_at_once(cluster: VLLMCluster, reference: Reference) -> None:
    """Twice: then with prefix hits. And then their clients leave."""
    prompts = prompts_of([3, 127, 128, 129, 2000, *(37 + 71 * i for i in range(25))], 7)
    right = [reference.tokens(prompt, TOKENS) for prompt in prompts]
    with ThreadPoolExecutor(30) as pool:
        for _ in range(2):
            found = pool.map(lambda prompt: streamed(cluster, prompt=prompt, max_tokens=TOKENS), prompts)
            assert list(found) == right
        left = [pool.submit(_leave, cluster, prompt, 1 + i % 4) for i, prompt in enumerate(prompts)]
        assert [each.result() for each in left] == [None] * 30
    cluster.assert_whole()


def _leave(cluster: VLLMCluster, prompt: list[int], after: int) -> None:
    """Leaves a stream after some events."""
    events = cluster.stream(prompt=prompt, max_tokens=200)
    for _ in range(after):
        next(events)
    events.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ("--enable-lora", 2, "--vllm-args: --enable-lora is Baton's own: leave it out"),
        ("--pipeline-parallel-size 2", 1, "supports tensor parallelism alone: start vLLM with one stage"),
    ],
)
def test_what_a_vllm_worker_lacks_is_refused(
    model: Path, tmp_path: Path, more: str, code: int, said: str
) -> None:
    """What is wrong with the options alone is refused before anything starts."""
    cluster = VLLMCluster(model, tmp_path, "--vllm-args", f"--enforce-eager {more}")
    try:
        assert cluster.process.wait(200) == code
        assert said in cluster.output()
    finally:
        cluster.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_with_two_ranks(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Each rank moves the heads that it has. A killed rank ends its engine, and streams go on."""
    cluster = VLLMCluster(model, tmp_path, *FLAGS, "--tensor-parallel-size", "2", fresh=True)
    try:
        cluster.until_ready()
        for prompt in prompts_of([3, 130, 300, 700], 11):
            assert streamed(cluster, prompt=prompt, max_tokens=TOKENS) == reference.tokens(prompt, TOKENS)
        assert cluster.workers()["decode"]["status"]["computed_prompt_tokens"] == 0, "all KV was handed over"
        [prompt] = prompts_of([60], 12)
        title = "decode 0 engine::Worker_TP1"
        cluster.goes_on(reference.tokens(prompt, 200), title, prompt=prompt)
        cluster.stop()
    finally:
        cluster.kill()
