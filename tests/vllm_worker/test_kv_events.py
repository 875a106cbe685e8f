"""A worker with vLLM publishes vLLM's own events about its prefix cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_helpers import attached, request, sampling, start_worker
from tests.vllm_worker.engines import PATHS, PYTHON
from tests.vllm_worker.served import prompts_of, save_model, save_tokenizer
from tests.vllm_worker.test_groups import SIZES, states, windows
from tests.within import within
from tests.worker.test_kv_events import TOPIC, Subscriber

pytestmark = pytest.mark.all


def attention(path: Path) -> dict[str, Any]:
    save_model(path)
    return {"block_size": 32, "num_blocks": 40}


def grouped(save: Callable[[Path], tuple[str, ...]], path: Path) -> None:
    save(path)
    save_tokenizer(path, SIZES["vocab_size"])


def with_states(path: Path) -> dict[str, Any]:
    """vLLM chooses blocks so large that pages of KV and of states are equal."""
    grouped(states, path)
    return {"num_blocks": 40}


def with_windows(path: Path) -> dict[str, Any]:
    grouped(windows, path)
    return {"block_size": 32, "num_blocks": 60}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("save", "block", "kinds"),
    [
        (attention, 32, {"full_attention"}),
        (with_states, 128, {"full_attention", "mamba"}),
        (with_windows, 32, {"full_attention", "sliding_window"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
async def test_a_subscriber_sees_hits(
    tmp_path: Path, save: Callable[[Path], dict[str, Any]], block: int, kinds: set[str]
) -> None:
    """It tells the group with all tokens from the others by the kind that the events name."""
    endpoint, model = f"ipc://{tmp_path}/events", tmp_path / "model"
    engine = {"dtype": "float32", "enable_prefix_caching": True, **save(model)}
    worker = start_worker(
        "prefill", model, tmp_path, engine={**engine, "max_model_len": 512}, fresh=True, python=str(PYTHON),
        variables={"PYTHONPATH": PATHS, "HF_HUB_OFFLINE": "1"}, engine_args=["--enforce-eager"],
        engine_module="baton.vllm_worker.engine_process", kv_events_endpoint=endpoint, kv_events_topic=TOPIC,
    ).wait_ready()  # fmt: skip
    subscriber = Subscriber(endpoint, block)
    await within(subscriber.connected())
    [prompt] = prompts_of([300], 1)
    async with attached(worker) as stream:
        prefill_id = await stream.submit_prefill(request(prompt, sampling(max_tokens=1)), handover=False)
        await stream.tokens(prefill_id)
        while subscriber.hit(prompt) < 300 // block * block:
            await within(subscriber.follow())
    assert set(subscriber.kinds.values()) == kinds
    subscriber.close()
    assert worker.stop() == 0
