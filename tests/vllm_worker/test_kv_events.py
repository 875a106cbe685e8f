"""A worker with vLLM publishes vLLM's own events about its prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_helpers import attached, request, sampling, start_worker
from tests.vllm_worker.engines import PATHS, PYTHON
from tests.vllm_worker.served import prompts_of, save_model
from tests.within import within
from tests.worker.test_kv_events import TOPIC, Subscriber

BLOCK = 32


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_subscriber_sees_hits(tmp_path: Path) -> None:
    model, endpoint = save_model(tmp_path / "model"), f"ipc://{tmp_path}/events"
    engine = {"dtype": "float32", "num_blocks": 40, "enable_prefix_caching": True, "block_size": BLOCK}
    worker = start_worker(
        "prefill", model, tmp_path, engine={**engine, "max_model_len": 512}, fresh=True, python=str(PYTHON),
        variables={"PYTHONPATH": PATHS, "HF_HUB_OFFLINE": "1"}, engine_args=["--enforce-eager"],
        engine_module="baton.vllm_worker.engine_process", kv_events_endpoint=endpoint, kv_events_topic=TOPIC,
    ).wait_ready()  # fmt: skip
    subscriber = Subscriber(endpoint, BLOCK)
    await within(subscriber.connected())
    [prompt] = prompts_of([200], 1)
    async with attached(worker) as stream:
        prefill_id = await stream.submit_prefill(request(prompt, sampling(max_tokens=1)), handover=False)
        await stream.tokens(prefill_id)
        while subscriber.hit(prompt) < 192:
            await within(subscriber.follow())
    subscriber.close()
    assert worker.stop() == 0
