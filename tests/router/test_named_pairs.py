"""The header x-handover: two named workers hand a request over. So `baton doctor` proves each pair."""

from pathlib import Path

from baton.cluster.options.clients import DoctorOptions, EndpointOptions
from baton.cluster.tools.doctor.running import running
from baton.router.policy.decode import DecodeLoad
from baton.router.policy.fleet import Seen
from baton.router.policy.planner import NOTHING, Lack, plan
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefill_loads import PrefillLoads
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

from .conftest import make_cluster
from .fleets import fleet_of, seen_worker


def test_the_decode_worker_of_a_pair_has_room_for_the_prompt_and_a_token() -> None:
    loads, workers = PrefillLoads(), list[Seen]()
    for name, pool in (("prefill", pb.POOL_PREFILL), ("decode", pb.POOL_DECODE)):
        row = loads.join(name, block_size=16, now=0.0)
        load = DecodeLoad(row, name, 16, blocks_total=100, max_running=64, blocks_free=4)
        workers.append(seen_worker(load, pool))
    fits, larger = (
        plan(PrefillRequest(0, tokens, pair=("prefill", "decode")), NOTHING, fleet_of(loads, workers))
        for tokens in (63, 64)
    )
    assert not isinstance(fits, Lack)
    assert fits.decode == workers[1].row
    assert larger is Lack.ROOM


async def test_the_doctor_has_each_pair_hand_over(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with make_cluster(tokenizer, tmp_path, prefill=2, decode=2) as cluster:

        async def findings() -> list[tuple[str, str]]:
            found = [f async for f in running(DoctorOptions(), EndpointOptions(url=cluster.url))]
            await cluster.idle()
            return [
                (each.level, each.check) for each in found if each.check.startswith(("KV f", "handovers"))
            ]

        assert await findings() == [("good", "handovers")]
        assert [len(each.submitted) >= 2 for each in cluster.workers] == [True] * 4

        async def blocked(prefill_id: bytes) -> None:
            cluster.lanes.of(prefill_id).settle(False)

        bad = cluster.prefills[1]
        bad._hand_over = blocked
        decodes = [f"decode {each.index} at {each.address}" for each in cluster.decodes]
        wrong = [("bad", f"KV from prefill 1 at {bad.address} to {decode}") for decode in decodes]
        assert sorted(await findings()) == sorted([*wrong, ("good", "handovers")])


async def test_unknown_workers_are_refused(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with make_cluster(tokenizer, tmp_path) as cluster:
        known = cluster.workers[0].address
        for sent in ("prefill-0", f"{known} {known}", f"{known} 127.0.0.1:9"):
            status, told = await cluster.post("/v1/completions", {"x-handover": sent}, prompt="Hello")
            assert (status, told["error"]["param"]) == (400, "x-handover")
