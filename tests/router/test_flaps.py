"""A link that flaps is logged once, and with its count when it ends."""

import logging
from pathlib import Path

import pytest

from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers import stream
from baton.router.workers.flaps import FLAP_SECONDS, Flaps

from .conftest import make_cluster


def test_a_loss_soon_after_another_one_is_only_counted() -> None:
    flaps = Flaps()
    assert flaps.lost(0.0, "broken", was_ready=True)
    assert flaps.lost(0.1, "refused", was_ready=False)
    assert not flaps.lost(0.2, "refused", was_ready=False), "not with each try"
    for turn in range(1, 8):
        assert not flaps.lost(turn * 5.0, "broken", was_ready=True)
        assert not flaps.lost(turn * 5.0 + 1, "refused", was_ready=False)
    assert flaps.lost(36.0, "another model", was_ready=False), "a new reason is news"
    assert flaps.taken() == 7
    assert flaps.count == 0
    assert flaps.lost(35.0 + FLAP_SECONDS, "broken", was_ready=True), "the link was well for a while"


@pytest.mark.all
async def test_a_link_that_flaps_has_one_warning_and_then_a_count(
    tokenizer: ModelTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton")
    async with make_cluster(tokenizer, tmp_path) as cluster:
        [worker], [flapping] = (
            cluster.prefills,
            [
                each
                for each in cluster.pool._streams.values()
                if each.worker.address == cluster.prefills[0].address
            ],
        )
        for _ in range(7):
            await worker.kill()
            await cluster.until(lambda: not flapping.worker.attached)
            await worker.start(int(worker.address.rpartition(":")[2]))
            await cluster.until(lambda: flapping.worker.attached)
        flapping._has_calmed()
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.name == stream.__name__ and str(flapping.worker) in record.getMessage()
        ]
    told = [line for line in lines if "is connecting" in line]
    assert len(told) == len(set(told)) < 7, "one for each reason"
    assert sum(line.endswith("is ready") for line in lines) == 2, "at first, and after the first loss"
    assert f"{flapping.worker} is ready, after its connection was lost 6 more times" in lines
