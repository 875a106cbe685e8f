"""Grammars are tried before vLLM gets them."""

import asyncio

import pytest

from baton.engine import Reasoning, StructuredOutput
from baton.vllm_worker.grammars import Gate
from baton.vllm_worker.sampling import after_reasoning, structure_fields
from tests.grammars.test_trials import chain


async def test_a_grammar_that_would_end_vllm_is_refused_and_others_pass() -> None:
    gate = Gate(300)
    good = [
        StructuredOutput("regex", "a+"), StructuredOutput("json_schema", "{}"),
        StructuredOutput("grammar", 'start: "a"'),
    ]  # fmt: skip
    reasoning = after_reasoning(None, Reasoning(290, 291, 1 << 17), [256, 7])
    checks = [gate.check(b"b", each) for each in (reasoning, *map(structure_fields, good))]
    bad = gate.check(b"a", structure_fields(StructuredOutput("grammar", chain(3000))))
    refused, *passed = await asyncio.gather(bad, *checks, return_exceptions=True)
    assert str(refused) == "structured output: too much to compile"
    assert passed == [None] * 4
    given_up = asyncio.create_task(gate.check(b"a", structure_fields(good[0])))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await gate.check(b"a", structure_fields(good[0]))
    gate.close()
