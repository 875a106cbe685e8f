from typing import Any

import pytest

from baton.bench.load import experiment
from baton.bench.load.experiment import Setup
from baton.bench.load.options import Options
from baton.bench.load.target.endpoint import EndpointError
from baton.bench.load.target.request import Api
from tests.bench.mock_server import BOS, TEMPLATE, Behavior, MockServer
from tests.bench.support import run_client

pytestmark = pytest.mark.all


async def _setup(server: MockServer, **more: Any) -> Setup:
    asked: dict[str, Any] = {"input_len": "77", "output_len": "3", "requests": 3} | more
    return await experiment.prepare(Options(url=server.url, **asked))


async def _set_up(**behavior: Any) -> Setup:
    async with MockServer(Behavior(ttft=0, **behavior)) as server:
        return await _setup(server)


async def _prompt_lengths(setup: Setup) -> set[int | None]:
    records = await run_client(setup.clients()[0])
    assert all(r.ok for r in records)
    return {r.prompt_tokens for r in records}


@pytest.mark.parametrize(("api", "overhead"), [("completions", BOS), ("chat", TEMPLATE)])
async def test_prompt_lengths_are_exact_with_tokenize(api: Api, overhead: int) -> None:
    """Words of more than one token are found out, and so is what the server adds itself."""
    async with MockServer(Behavior(ttft=0)) as server:
        setup = await _setup(server, api=api)
        assert setup.client.tokenization.overhead == overhead
        assert setup.client.tokenization.statement.startswith("exact")
        assert all(len(w) <= 5 for w in setup.client.tokenization.words)
        assert setup.notes == ()
        assert await _prompt_lengths(setup) == {77}


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_approximate_prompt_lengths_are_reported_as_such(api: Api) -> None:
    async with MockServer(Behavior(ttft=0, tokenize=False)) as server:
        setup = await _setup(server, api=api)
        assert not setup.client.tokenization.statement.startswith("exact")
        assert "approximate" in setup.client.tokenization.statement
        assert setup.client.tokenization.tokens_per_word > 1
        lengths = await _prompt_lengths(setup)
    assert all(n is not None and 60 <= n <= 95 for n in lengths)


AGENTS: dict[str, Any] = {"context_len": 20, "turns": "3", "think_time": "0"}


@pytest.mark.parametrize(
    ("asked", "behavior", "form", "note"),
    [
        (AGENTS, {}, "ids", ""),
        ({}, {}, "text", ""),
        ({"prompts": "ids"}, {}, "ids", ""),
        (AGENTS | {"prompts": "text"}, {}, "text", ""),
        (AGENTS | {"api": "chat"}, {}, "text", "messages of a chat"),
        (AGENTS, {"tokenize": False}, "text", "no /tokenize"),
        (AGENTS, {"takes_ids": False}, "text", "http_400"),
    ],
)
async def test_agents_have_prompts_of_token_ids_if_the_server_takes_them(
    asked: dict[str, Any], behavior: dict[str, Any], form: str, note: str
) -> None:
    async with MockServer(Behavior(ttft=0, **behavior)) as server:
        setup = await _setup(server, requests=1, **asked)
        records = await run_client(setup.clients()[0])
    assert setup.parameters()["prompts"] == form
    assert any(note in said for said in setup.notes) if note else not setup.notes
    assert [r.error_class for r in records] == [""] * len(setup.client.workload.session(0).turns)
    if form == "ids":
        assert all(r.prompt_tokens == r.asked_input for r in records), "also of later turns"


async def test_token_ids_that_were_asked_for_and_cannot_be_are_an_error() -> None:
    async with MockServer(Behavior(ttft=0, takes_ids=False)) as server:
        with pytest.raises(
            EndpointError, match=r"--advanced.prompts ids: .*http_400.*Give --advanced.prompts text"
        ):
            await _setup(server, prompts="ids")


async def test_a_server_without_token_counts() -> None:
    setup = await _set_up(tokenize=False, usage=False)
    assert "assumed" in setup.client.tokenization.statement
    assert any("no usage" in note for note in setup.notes)


async def test_a_strict_server_gets_requests_without_extensions() -> None:
    async with MockServer(Behavior(ttft=0, strict=True)) as server:
        setup = await _setup(server)
        records = await run_client(setup.clients()[0])
    dialect = setup.client.target.dialect
    assert (dialect.usage, dialect.running_usage, dialect.ignore_eos) == (True, False, False)
    assert any("ignore_eos" in note for note in setup.notes)
    assert [r.output_tokens for r in records] == [3, 3, 3]


async def test_a_server_that_ignores_unknown_fields() -> None:
    setup = await _set_up(running_usage=False, tokens_per_chunk=2)
    assert any("no running usage" in note for note in setup.notes)


async def test_the_first_or_the_named_model_is_used() -> None:
    async with MockServer(Behavior(ttft=0)) as server:
        assert (await _setup(server)).client.target.model == "mock"
        with pytest.raises(EndpointError, match="--model 'other': the server has mock"):
            await _setup(server, model="other")


async def test_a_missing_key_is_reported() -> None:
    async with MockServer(Behavior(ttft=0, api_key="secret")) as server:
        with pytest.raises(EndpointError, match=r"401.*--api-key"):
            await _setup(server)
        setup = await _setup(server, api_key="secret")
        assert await _prompt_lengths(setup) == {77}
    assert "secret" not in str(setup.parameters())


async def test_what_is_no_openai_server_is_an_error_with_a_remedy() -> None:
    with pytest.raises(EndpointError, match=r"--url http://127.0.0.1:1: no answer.*Start the server"):
        await experiment.prepare(Options(url="http://127.0.0.1:1"))
    async with MockServer(Behavior(ttft=0)) as server:
        with pytest.raises(EndpointError, match=r"lists no model.*without /v1"):
            await experiment.prepare(Options(url=f"{server.url}/metrics"))


@pytest.mark.parametrize(
    ("fault", "said"), [("500", "http_500"), ("html", "garbage"), ("half", "half_streamed")]
)
async def test_a_failed_probe_reports_the_failure(fault: str, said: str) -> None:
    with pytest.raises(EndpointError, match=rf"a probe of http.*failed: {said}"):
        await _set_up(faults=(fault,))


async def test_prompts_that_are_too_long_are_refused_before_the_run() -> None:
    async with MockServer(Behavior(ttft=0, max_model_len=100)) as server:
        await _setup(server, input_len="90", output_len="10")
        with pytest.raises(ValueError, match=r"3 of 3 sessions need more .* 100 tokens, up to 101"):
            await _setup(server, input_len="91", output_len="10")
        with pytest.raises(ValueError, match=r"--input-len 1: .*give at least 2"):
            await _setup(server, input_len="1")
