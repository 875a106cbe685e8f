"""The replay of chats: which request continues which, what the prompts have in common, what the rows say."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.bench.chaos.streams import Case, Stream
from baton.bench.contract import Report
from baton.bench.load.traffic.datasets import MOONCAKE_BLOCK, SAMPLE_TRACE, TraceLine, read_trace
from baton.bench.reuse import replay as bench
from baton.bench.reuse.chats import (
    CACHE_BLOCK,
    Asked,
    InfiniteCache,
    Prompts,
    asked_of,
    distinct_tokens,
    synthetic,
)


def line(at: float, length: int, ids: list[int], answer: int = 10) -> TraceLine:
    return TraceLine(at, length, answer, ids)


def before(*lines: TraceLine) -> list[int | None]:
    return [asked.before for asked in asked_of(lines, length_scale=1, time_scale=1)]


def test_a_request_continues_the_last_one_of_its_chat() -> None:
    first = line(0, 600, [1, 2])  # 2 is a part of a block
    assert before(first, line(1, 1100, [1, 3, 4]), line(2, 1700, [1, 3, 5, 6])) == [None, 0, 1]
    assert before(first, line(1, 605, [1, 2])) == [None, None], "no room for the answer"
    assert before(first, line(1, 1100, [9, 3, 4])) == [None, None], "it begins otherwise"
    assert before(line(0, 500, [1]), line(1, 1100, [1, 3, 4])) == [None, None], "1 may be any text"
    assert before(first, line(1, 1100, [1, 3, 4]), line(2, 1100, [1, 7, 8])) == [None, None, None], (
        "prompts differ after 1, as after a system prompt"
    )
    again = (line(1, 1100, [1, 3, 4]), line(2, 1700, [1, 3, 5, 6]), line(3, 1100, [1, 3, 4]))
    assert before(first, *again) == [None, 0, 1, None], "it goes back, and is sent again"


def test_times_and_lengths_are_scaled() -> None:
    lines = [line(5000, 1024, [1, 2], 100), line(7000, 1030, [1, 2, 3], 0)]
    assert asked_of(lines, length_scale=0.25, time_scale=0.5) == [
        Asked(0.0, 256, 25, (1, 2), None),
        Asked(4.0, 258, 1, (1, 2, 3), None),
    ]


def test_tokens_that_came_before_are_not_distinct() -> None:
    first, second = line(0, 600, [1, 2], answer=50), line(1, 1100, [1, 3, 4], answer=20)
    asked = asked_of([first, second], length_scale=1, time_scale=1)
    assert distinct_tokens(asked, length_scale=1) == 650 + (1100 - 650) + 20
    other = line(2, 700, [1, 9], answer=10)  # begins with the block, but continues no chat
    asked = asked_of([first, second, other], length_scale=1, time_scale=1)
    assert distinct_tokens(asked, length_scale=1) == 650 + 470 + (700 - 512) + 10


def test_the_made_up_trace_is_one_of_chats() -> None:
    lines = synthetic(200, seed=1)
    assert lines == synthetic(200, seed=1) != synthetic(200, seed=2)
    assert len(lines) == 200
    assert all(len(x.hash_ids) == -(-x.input_length // MOONCAKE_BLOCK) for x in lines)
    assert [x.timestamp for x in lines] == sorted(x.timestamp for x in lines)
    asked = asked_of(lines, length_scale=1, time_scale=1)
    assert 60 < sum(one.before is not None for one in asked) < 160
    assert asked[-1].at == pytest.approx(200 / 15, rel=0.7)


@pytest.mark.parametrize("scale", [1.0, 1 / 8])
@pytest.mark.parametrize(
    "lines", [synthetic(60, seed=0), read_trace(SAMPLE_TRACE)], ids=["made up", "sample"]
)
def test_prompts_continue_answers_and_share_the_blocks_of_the_trace(
    lines: list[TraceLine], scale: float
) -> None:
    asked = asked_of(lines, length_scale=scale, time_scale=1)
    prompts, other = (Prompts(asked, length_scale=scale, seed=seed) for seed in (1, 2))
    block = round(MOONCAKE_BLOCK * scale)
    written: list[list[int]] = []
    tokens_of: dict[int, list[int]] = {}
    for number, one in enumerate(asked):
        prompt, answer = prompts.write(number), [number] * one.answer
        assert len(prompt) == one.length
        if one.before is not None:
            text = [*written[one.before], *[one.before] * asked[one.before].answer]
            assert prompt[: len(text)] == text
        for index, name in enumerate(one.blocks[: len(prompt) // block]):
            tokens = prompt[index * block : (index + 1) * block]
            assert tokens_of.setdefault(name, tokens) == tokens
        prompts.answered(number, prompt, answer)
        written.append(prompt)
    assert other.write(0)[:8] != written[0][:8]


def test_an_infinite_cache_knows_all_that_came_before_up_to_the_last_token() -> None:
    cache, text = InfiniteCache(), list(range(1000))
    assert cache.find(text) == 0
    cache.add(text)
    assert cache.find(text) == 999 // CACHE_BLOCK * CACHE_BLOCK
    assert cache.find([*text[:500], *text]) == 500 // CACHE_BLOCK * CACHE_BLOCK
    assert cache.find([5, *text]) == 0


class Server:
    """Answers at once, and says of each prompt that half of it was cached."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def read(self, http: Any, url: str, case: Case, *, prompt: list[int], **_: Any) -> Stream:
        self.prompts.append(prompt)
        answer = [len(self.prompts)] * case.max_tokens
        now = bench.time.monotonic()
        return Stream(
            case, started=now, ended=now, token_ids=answer, arrivals=[now] * len(answer),
            cached_tokens=len(prompt) // 2, finish_reason="length",
        )  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(bench, "read", made.read)
    return made


CHAT = [Asked(0.0, 100, 5, (), None), Asked(0.0, 200, 5, (), 0), Asked(0.0, 300, 5, (), 1)]


async def test_a_turn_is_sent_after_the_answer_that_it_continues(server: Server) -> None:
    run = await bench.replay("", CHAT, Prompts(CHAT, length_scale=1, seed=0), known=True)
    first, second, third = server.prompts
    assert second[:105] == [*first, *[1] * 5]
    assert third[:205] == [*second, *[2] * 5]
    assert run.hits == 0.5
    assert run.bound == (105 // CACHE_BLOCK + 205 // CACHE_BLOCK) * CACHE_BLOCK / 600


async def test_without_known_beginnings_nothing_can_be_cached(server: Server) -> None:
    run = await bench.replay("", CHAT, Prompts(CHAT, length_scale=1, seed=0), known=False)
    assert run.bound == 0
    assert [len(prompt) for prompt in server.prompts] == [100, 200, 300]


async def test_a_trace_without_repeated_beginnings_has_no_ratio(server: Server, tmp_path: Path) -> None:
    run = await bench.replay("", CHAT[:1], Prompts(CHAT, length_scale=1, seed=0), known=True)
    report = Report("reuse", {}, tmp_path / "report.json")
    bench.rows(report, "cpu", bench.MECHANISMS[-1], run, moved=0.0)
    (hits,) = (row for row in report.rows if row.name.endswith(".hits"))
    assert (hits.value, hits.ratio) == (0.5, None)


async def test_a_request_that_fails_ends_the_replay(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_: Any, **__: Any) -> Stream:
        return Stream(Case("", 1, 0.0, 1), error="no")

    monkeypatch.setattr(bench, "read", read)
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await bench.replay("", CHAT, Prompts(CHAT, length_scale=1, seed=0), known=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("working_set", [0.5, 4.0])
def test_a_pool_holds_its_share_of_the_trace_and_any_one_request(device: str, working_set: float) -> None:
    asked = asked_of(synthetic(60, seed=0), length_scale=1, time_scale=1)
    without, with_tier = bench.with_small_pools(device, asked, working_set, 1)
    assert without.num_blocks == with_tier.num_blocks
    tokens = (without.num_blocks or 0) * bench.BLOCK[device]
    assert tokens == pytest.approx(distinct_tokens(asked, length_scale=1) / working_set, rel=0.05)
    assert tokens > max(one.length + one.answer for one in asked)
    assert (without.host_tier, with_tier.host_tier) == (False, True)


def test_each_mechanism_has_its_rows(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.bench.test_smoke import check_flags

    routers: list[tuple[str, ...]] = []

    def started(
        directory: Path,
        *,
        worker_flags: list[str],
        decode_flags: list[str],
        router_flags: list[str],
        **_: Any,
    ) -> contextlib.nullcontext[SimpleNamespace]:
        check_flags("prefill", *worker_flags)
        check_flags("decode", *worker_flags, *decode_flags)

        def restart(*flags: str) -> None:
            check_flags("router", *router_flags, *flags)
            routers.append(flags)

        return contextlib.nullcontext(SimpleNamespace(url="", restart_router=restart, workers=[]))

    monkeypatch.setattr(bench, "LocalCluster", started)
    monkeypatch.setattr(bench, "REPORT_S", 0.0)
    args: Any = SimpleNamespace(
        device="cpu", short=True, trace="default", requests=6, length_scale=None, time_scale=1000.0,
        model=None, kv_connector="auto", json=tmp_path / "report.json", working_set=None,
    )  # fmt: skip
    values = {row.name: row for row in bench.measure(args).rows}
    names = [mechanism.name for mechanism in bench.MECHANISMS]
    assert {f"reuse.cpu.trace.{name}.{what}" for name in names for what in ("ttft", "goodput", "moved")} < {
        *values
    }
    assert values["reuse.cpu.trace.all.hits"].value == pytest.approx(0.5, abs=0.01)
    assert "reuse.cpu.trace.computed.hits" not in values
    alone, fetches = bench.MECHANISMS[0].router_flags, bench.MECHANISMS[-2].router_flags
    assert routers == [alone, alone, fetches, ()], "the first two have the same workers and flags"
    assert (tmp_path / "report.json").exists()
    args.working_set = 2.0
    names = [row.name for row in bench.measure(args).rows if row.name.endswith(".hits")]
    assert names == [f"reuse.cpu.trace.working_set_2.{tier}.hits" for tier in ("no_host_tier", "host_tier")]
