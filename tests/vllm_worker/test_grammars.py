"""Grammars are tried before vLLM gets them."""

import asyncio
from pathlib import Path

import pytest
from llguidance import LLMatcher, hf
from transformers import PreTrainedTokenizerFast

from baton.engine import Reasoning, StructuredOutput
from baton.vllm_worker.grammars import Gate, find_no_special_tokens_in_texts
from baton.vllm_worker.sampling import after_reasoning, structure_fields
from tests.engine.conftest import save_spelled_tokenizer
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


def test_a_text_that_spells_a_special_token_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes its tokenizer of grammars so."""
    save_spelled_tokenizer(tmp_path)
    monkeypatch.setattr(hf, "LLTokenizer", hf.LLTokenizer)
    find_no_special_tokens_in_texts()
    given = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="</s>")
    grammar = LLMatcher.grammar_from_lark('start: "<s>"')
    matcher = LLMatcher(hf.from_tokenizer(given, len(given)), grammar, log_level=0)
    written = []
    while not matcher.is_accepting():
        bits = matcher.compute_bitmask()
        [token] = (token for token in range(len(given)) if bits[token // 8] >> token % 8 & 1)
        assert matcher.consume_token(token), matcher.get_error()
        written.append(token)
    assert given.convert_ids_to_tokens(written) == ["<", "s", ">"]
