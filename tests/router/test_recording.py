"""A record of what a router's desk was told gives the same plans again."""

import asyncio
from pathlib import Path

from baton.router.policy.plan import Plan
from baton.router.policy.recording import replay
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers.checks import step_model

from .conftest import make_cluster


async def test_recorded_events_give_the_same_plans(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """Also if workers are lost meanwhile."""
    async with make_cluster(tokenizer, tmp_path, record_plans=str(tmp_path / "plans")) as cluster:
        prompts = [[5 + i % 3] * (70 + 30 * i) for i in range(12)]
        first = [asyncio.create_task(cluster.complete(prompt=prompt)) for prompt in prompts]
        await asyncio.gather(*first)
        await cluster.prefills[0].kill()
        await cluster.until(lambda: len(cluster.pool.desk.prefills) < len(cluster.prefills))
        await asyncio.gather(*(cluster.complete(prompt=prompt) for prompt in prompts[:4]))
    [file] = tmp_path.glob("plans.*")
    plans = list(replay(file.read_bytes().splitlines(), step_model))
    assert all(recorded == now for recorded, now in plans)
    ranges = [recorded.ranges for recorded, _ in plans if isinstance(recorded, Plan) and recorded.ranges]
    assert len(ranges) >= 12
    assert len({first.worker for first, *_ in ranges}) > 1
