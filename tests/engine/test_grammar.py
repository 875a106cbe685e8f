"""Structured output: the output has the requested structure, whichever tokens the model prefers."""

import itertools
import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from baton.engine import Engine, Reasoning, StructuredOutput, grammar_compiler
from baton.engine.core.adjustments import build_adjustments
from baton.engine.core.live_request import LiveRequest
from baton.engine.execution.sampler import adjust
from baton.engine.grammar import SPARE_SECONDS, Grammars, Matcher, too_dear
from baton.engine.grammar_compiler import Compiler, Key, Shared
from baton.engine.loader.tokenizer_json import tokenizer_json
from baton.grammars.compiler import LIMITS, Alphabet, compiled
from tests.engine.conftest import MakeEngine, request_of, run, tokens_of
from tests.engine.scheduling import end, live_of
from tests.engine.told_device import ToldDevice
from tests.shallow import VOCABULARY
from tests.within import WITHIN

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/flag"}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                       "additionalProperties": False}},
}  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": {"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 20},
     "minItems": 2, "maxItems": 4},
    {"type": "string", "format": "date"},
]  # fmt: skip


def json_schema(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


@pytest.fixture
def spelled_engine(tiny_engine: MakeEngine, spelled_path: Path) -> Callable[..., Engine]:
    return lambda **config: tiny_engine(tokenizer=str(spelled_path), **{"num_blocks": 256, **config})


@pytest.fixture(scope="session")
def text_of(spelled_path: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(spelled_path / "tokenizer.json"))
    return lambda tokens: tokenizer.decode(tokens)


@pytest.mark.cases(1)
@pytest.mark.parametrize("chunk", [64, 256])
def test_json_is_valid_in_a_mixed_batch(spelled_engine: Any, text_of: Any, chunk: int) -> None:
    engine = spelled_engine(max_num_batched_tokens=chunk)
    shape = {"temperature": 1.0, "max_tokens": 200}
    constrained = [
        request_of(
            i, [1, 5 + i, 9, 40], seed=i, structured_output=json_schema(SCHEMAS[i % len(SCHEMAS)]), **shape
        )
        for i in range(24)
    ]
    free = [request_of(100 + i, [1, 5 + i, 9], seed=i, temperature=0.8, max_tokens=20) for i in range(6)]
    mixed = [r for pair in zip(constrained[:6], free, strict=True) for r in pair] + constrained[6:]
    results = run(engine, mixed)
    distinct = set()
    for i, request in enumerate(constrained):
        result = results[request.id]
        assert result.finish_reason == "stop"
        assert result.tokens[-1] == EOS
        text = text_of(result.tokens[:-1])
        jsonschema.validate(json.loads(text), SCHEMAS[i % len(SCHEMAS)])
        distinct.add(text)
    assert len(distinct) > 12
    alone = run(spelled_engine(), free)
    assert all(results[r.id].tokens == alone[r.id].tokens for r in free)
    engine.assert_whole()


def test_a_step_is_launched_before_its_grammars_know_the_last_token(
    late_engine: Any, spelled_engine: Any, spelled_path: Path
) -> None:
    wanted = StructuredOutput("regex", "(ab|cd){3}")
    requests = [
        request_of(1, [1, 9], temperature=1.0, max_tokens=30, structured_output=wanted),
        request_of(2, [1, 7, 8], max_tokens=12, ignore_eos=True),
    ]
    expected = run(spelled_engine(overlap=False), requests)
    engine = late_engine(model=str(spelled_path), num_blocks=64)
    for request in requests:
        engine.add(request)
    got: dict[bytes, list[int]] = {request.id: [] for request in requests}
    unsampled = 0
    while engine.loop.has_work:
        result = engine.loop.step()
        for output in result.outputs:
            got[output.id].append(output.token)
        sampled = [launched.is_sampled for _, launched in engine.loop.under_way]
        unsampled += not all(sampled)
        assert sampled in ([], [True], [True, True], [True, False]), "one waits for tokens of the one before"
    assert got == {key: result.tokens for key, result in expected.items()}
    assert unsampled >= 5, "all of the grammar's tokens but the first"
    engine.assert_whole()


def test_regex_and_grammar(spelled_engine: Any, text_of: Any) -> None:
    regex = r"[a-f]{3}-(yes|no)( [0-9]{2}){1,3}"
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER){1,4}\nNUMBER: /[1-9][0-9]?/'
    requests = [
        request_of(i, [1, 7 + i], temperature=1.0, seed=i, max_tokens=60, structured_output=wanted)
        for i, wanted in enumerate([StructuredOutput("regex", regex), StructuredOutput("grammar", lark)] * 6)
    ]
    results = run(spelled_engine(), requests)
    for i, request in enumerate(requests):
        text = text_of(results[request.id].tokens[:-1])
        assert re.fullmatch((regex, r"[1-9][0-9]?(\+[1-9][0-9]?){1,4}")[i % 2], text)


def test_a_text_that_spells_a_special_token_is_written(spelled_engine: Any, text_of: Any) -> None:
    """The tokenizer finds the token in the text, and llguidance refuses it there."""
    texts = ["a</s>b", "<unk>"]
    requests = [
        request_of(i, [1, 5], max_tokens=30, structured_output=json_schema({"const": text}))
        for i, text in enumerate(texts)
    ]
    results = run(spelled_engine(), requests)
    written = [results[request.id].tokens for request in requests]
    assert [json.loads(text_of(tokens[:-1])) for tokens in written] == texts
    assert all(EOS not in tokens[:-1] for tokens in written)


@pytest.mark.all
def test_eos_is_allowed_only_where_the_grammar_may_end(spelled_engine: Any, text_of: Any) -> None:
    """A bias makes EOS the most likely token everywhere."""
    wanted = StructuredOutput("regex", "ab{4,9}c?")
    request = request_of(1, [1, 9], logit_bias={EOS: 100.0}, max_tokens=30, structured_output=wanted)
    result = run(spelled_engine(), [request])[request.id]
    assert (text_of(result.tokens[:-1]), result.finish_reason) == ("abbbb", "stop")


@pytest.mark.all
def test_the_grammar_ends_before_min_tokens(spelled_engine: Any, text_of: Any) -> None:
    wanted = StructuredOutput("regex", "a{2,4}")
    for temperature in (0.0, 1.0):
        request = request_of(
            1, [1, 9], temperature=temperature, min_tokens=20, max_tokens=30, structured_output=wanted
        )
        result = run(spelled_engine(), [request])[request.id]
        assert (text_of(result.tokens[:-1]), result.finish_reason) == ("aaaa", "stop")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (StructuredOutput("regex", "(a"), "unclosed group"),
        (StructuredOutput("json_schema", '{"type": "strin"}'), "Invalid type"),
        (StructuredOutput("grammar", "start: nothing"), "unknown name"),
        (StructuredOutput("grammar", "start: s\ns: s s s | s s | /[!-~]/"), "Too many items"),
    ],
)
def test_a_failed_grammar_fails_only_its_request(
    spelled_engine: Any, monkeypatch: pytest.MonkeyPatch, wanted: StructuredOutput, reason: str
) -> None:
    monkeypatch.setitem(LIMITS, "step_max_items", 500)
    engine = spelled_engine()
    never_eos = {"max_tokens": 200, "logit_bias": {EOS: -100.0}, "structured_output": wanted}
    engine.add(request_of(1, [1, 5], **never_eos))
    engine.add(request_of(3, [1, 5], [40] * 99, **never_eos), handover=True)
    other = request_of(2, [1, 5], max_tokens=9, ignore_eos=True)
    results = run(engine, [other])
    assert len(results.pop(other.id).tokens) == 9
    assert {int.from_bytes(request_id) for request_id in results} == {1, 3}
    assert all(reason in (result.refused or "") for result in results.values())
    with pytest.raises(AssertionError, match="no token to go on from"):
        engine.resume(live_of(engine, (3).to_bytes(16)), b"resumed")
    end(engine, (3).to_bytes(16))
    engine.assert_whole()


@pytest.mark.all
@pytest.mark.parametrize("given", [0, 150])
def test_a_grammar_that_takes_too_long_fails_its_request_only(
    spelled_engine: Any, spelled_path: Path, given: int
) -> None:
    """This grammar matches a text in many ways, so each token takes longer than the one before. An earlier
    worker may have generated the beginning."""
    letter = Tokenizer.from_file(str(spelled_path / "tokenizer.json")).token_to_id("a")
    assert letter is not None
    engine = spelled_engine(num_blocks=1024)
    wanted = StructuredOutput("grammar", 'start: s\ns: s s | s s s | "a" | ""')
    slow = {"max_tokens": 2000, "logit_bias": {EOS: -100.0}, "structured_output": wanted}
    *requests, other = (
        *(request_of(number, [1, 5], [letter] * given, **slow) for number in range(2)),
        request_of(9, [1, 5], max_tokens=20, ignore_eos=True),
    )
    results = run(engine, [*requests, other])
    assert len(results[other.id].tokens) == 20
    for request in requests:
        assert "takes more than 2 ms for each token" in (results[request.id].refused or "")
    engine.assert_whole()


CHAIN = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(3000)) + '\nr3000: "x"'
"""Overflows the stack of the compiler."""


@pytest.mark.all
def test_a_grammar_that_would_end_the_engine_fails_its_request_only(spelled_engine: Any) -> None:
    engine = spelled_engine()
    requests = [
        request_of(i, [1, 5], max_tokens=9, structured_output=wanted)
        for i, wanted in enumerate([StructuredOutput("grammar", CHAIN), StructuredOutput("regex", "ab")])
    ]
    ended, served = run(engine, requests).values()
    assert ended.refused == "structured output: too much to compile"
    assert len(served.tokens) == 3
    engine.assert_whole()


@pytest.mark.all
def test_requests_with_one_text_share_a_grammar(spelled_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is given back when no request uses it, and if it is large, not kept for others."""
    compiled: list[Shared] = []
    use = Compiler._use

    def noted(self: Any, shared: Any) -> Any:
        compiled.append(shared)
        return use(self, shared)

    monkeypatch.setattr(Compiler, "_use", noted)
    monkeypatch.setattr(grammar_compiler, "_SPREAD_BYTES", 1 << 20)
    monkeypatch.setattr(grammar_compiler, "_IDLE_BYTES", 1 << 20)
    engine, costly = spelled_engine(), {"type": "array", "items": {"type": "integer", "multipleOf": 9973}}
    compiler = engine._grammars._compiler
    for tenants, count in ((b"a",), 1), ((b"a", b"b"), 2):
        requests = [
            replace(
                request_of(i, [1, 5 + i], max_tokens=4, structured_output=json_schema(costly)),
                tenant=tenants[i % len(tenants)],
            )
            for i in range(8)
        ]
        compiled.clear()
        assert all(result.tokens for result in run(engine, requests).values())
        assert len(compiled) == 8
        assert len(set(compiled)) == count
        with pytest.raises(ValueError):  # the compiler frees what was released before it compiles
            compiler.compile(b"c", StructuredOutput("regex", "("), id).result()
        assert not any(hasattr(shared, "_matcher") for shared in compiled), "it is freed, whatever knows it"
    engine.assert_whole()


def test_grammars_of_one_tenant_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MOST_BYTES", 4 << 20)
    compiler: Compiler[Shared] = Compiler(lambda: Alphabet(300).tokenizer(), 300, threads=1)

    def compiled(tenant: bytes, schema: dict[str, Any]) -> Shared:
        return compiler.compile(tenant, json_schema(schema), lambda shared: shared).result()

    def long(i: int) -> dict[str, Any]:
        return {"enum": [f"{i} {j}" for j in range(4000)]}

    try:
        of_many = [compiled(b"many", long(0))]
        with pytest.raises(ValueError, match="more than 4 MiB together; send fewer"):
            of_many += [compiled(b"many", long(i)) for i in range(1, 9)]
        small = [compiled(b"one", {"enum": ["a"]}) for _ in range(2)]
        assert small[0] is small[1]
        of_many[0].release()
        compiled(b"many", long(9))
    finally:
        compiler.close()


def test_small_grammars_that_no_request_uses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial counts a quarter of what each takes."""
    monkeypatch.setattr(grammar_compiler, "_IDLE_BYTES", 1 << 20)
    compiler: Compiler[Shared] = Compiler(lambda: Alphabet(300).tokenizer(), 300, threads=1)
    released: list[Shared] = []

    def compiled(i: int) -> Shared:
        return compiler.compile(b"a", json_schema({"enum": [i]}), lambda shared: shared).result()

    try:
        for i in range(12):
            released.append(compiled(i))
            released[-1].release()
        found = [compiled(i) is released[i] for i in reversed(range(12))]
        assert found[0]
        assert sum(found) <= 8
    finally:
        compiler.close()


def test_quick_tokens_save_no_time_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unshared: Any = None
    matcher = Matcher(compiled(Alphabet(300).tokenizer(), "regex", "a*"), unshared)
    monkeypatch.setattr("baton.engine.grammar.time.thread_time", lambda: 0.0)
    matcher.consume([ord("a")] * 500)
    matcher.check()
    passed = itertools.count()
    monkeypatch.setattr("baton.engine.grammar.time.thread_time", lambda: next(passed) * 1.01 * SPARE_SECONDS)
    matcher.fill(np.zeros(10, np.uint32))
    with pytest.raises(ValueError, match="takes more than 2 ms for each token"):
        matcher.check()


def test_the_dear_grammars_of_a_tenant_are_bounded_together() -> None:
    cheap, dear = [(b"a", 0.0004)] * 200, [(b"a", 0.0019 + i * 1e-6) for i in range(12)]
    others = [(b"b", 0.0019)] * 10
    rows = [*dear, *cheap, *others]
    failed = too_dear(rows)
    assert sorted(failed) == [10, 11], "the dearest ones of this tenant"
    assert too_dear([*cheap, *others]) == []


def test_given_output_that_violates_the_grammar_is_refused(spelled_engine: Any) -> None:
    engine = spelled_engine()
    wanted = StructuredOutput("regex", "a{9}")
    request = request_of(1, [1, 5], [40, 41], max_tokens=9, structured_output=wanted)
    assert "doesn't satisfy the grammar" in (run(engine, [request])[request.id].refused or "")
    engine.assert_whole()


@pytest.mark.cases(1)
@pytest.mark.parametrize("grammar", ["start: B", 'start: "a" B', 'start: start "a"'])
def test_a_dead_end_of_a_grammar_says_so(spelled_engine: Any, grammar: str) -> None:
    engine = spelled_engine()
    wanted = StructuredOutput("grammar", f"{grammar}\nB: /x/ & /y/")
    [result] = run(engine, [request_of(1, [1, 5], max_tokens=9, structured_output=wanted)]).values()
    assert "the grammar allows no token after this output" in (result.refused or "")
    engine.assert_whole()


def test_a_model_without_tokenizer_refuses_structured_output_only(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    request = request_of(1, [1, 5], structured_output=StructuredOutput("regex", "a"))
    assert "tokenizer.json cannot be read" in (run(engine, [request])[request.id].refused or "")
    assert tokens_of(engine, [request_of(2, [1, 5], max_tokens=3, ignore_eos=True)])[0]


@pytest.fixture
def may_compile(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no grammar is compiled."""
    event = threading.Event()
    shared = Compiler._shared

    def when_allowed(self: Any, *given: Any) -> Any:
        assert event.wait(60)
        return shared(self, *given)

    monkeypatch.setattr(Compiler, "_shared", when_allowed)
    return event


@pytest.mark.cases(1)
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("caching", [False, True])
def test_requests_that_wait_for_their_grammars_delay_no_other(
    spelled_engine: Any, text_of: Any, may_compile: threading.Event, length: int, caching: bool
) -> None:
    """Though they are as many as there may be in a batch, and would fill the pool."""
    engine = spelled_engine(
        max_num_seqs=2, num_blocks=24, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    prompt = [1 + i % 90 for i in range(length)]
    abc = StructuredOutput("regex", "abc")
    for number in range(4):
        engine.add(request_of(number, [*prompt, number], max_tokens=9, structured_output=abc))
    engine.add(request_of(4, prompt, max_tokens=9, ignore_eos=True))
    assert engine.stats().requests_waiting == 5
    outputs = []
    while len(outputs) < 9:
        outputs += engine.loop.step().outputs
    assert {output.id for output in outputs} == {(4).to_bytes(16)}
    assert engine.loop.has_work
    assert engine.loop.step().outputs == []
    may_compile.set()
    outputs.clear()
    while engine.loop.has_work:
        outputs += engine.loop.step().outputs
    for number in range(4):
        tokens = [output.token for output in outputs if output.id == number.to_bytes(16)]
        assert text_of(tokens[:-1]) == "abc"
    engine.assert_whole()


@pytest.mark.parametrize("queued", [True, False])
def test_a_grammar_that_is_ready_wakes_an_engine_beside_a_step(
    spelled_engine: Any, may_compile: threading.Event, queued: bool
) -> None:
    """Of a request that it holds back from the queue, or of which it computes all of the prompt but the last
    token meanwhile."""
    engine = spelled_engine(overlap=True)
    device = ToldDevice(engine)
    asked = request_of(1, [1, 5, 7], max_tokens=9, structured_output=StructuredOutput("regex", "abc"))
    if queued:
        engine.add(asked)
        engine.add(request_of(2, [1, 5], max_tokens=1))
    else:
        engine.start(asked)
    engine.loop.step()
    assert len(engine.loop.under_way) == 1
    assert engine.loop.seconds_to_step == math.inf
    assert not device.woken()
    may_compile.set()
    assert device.woken(WITHIN)
    assert engine.loop.seconds_to_step < math.inf
    engine.loop.step()
    assert len(engine.loop.under_way) == 2
    device.finish()
    engine.close()


def test_cancelling_a_request_cancels_its_grammar(
    spelled_engine: Any, monkeypatch: pytest.MonkeyPatch, may_compile: threading.Event
) -> None:
    compiled = []
    shared = Compiler._shared

    def noted(self: Any, key: Key) -> Any:
        compiled.append(key.wanted.text)
        return shared(self, key)

    monkeypatch.setattr(Compiler, "_shared", noted)
    engine = spelled_engine()
    requests = [
        request_of(i, [1, 5], max_tokens=9, structured_output=StructuredOutput("regex", "ab"[i % 2] * i))
        for i in range(1, 6)
    ]
    for request in requests:
        engine.add(request)
    for request in requests[1:4]:
        end(engine, request.id)
    may_compile.set()
    run(engine)
    assert compiled == ["b", "bbbbb"]
    engine.assert_whole()


@pytest.mark.cases(1)
@pytest.mark.parametrize("structure", [StructuredOutput("regex", "ab{2,4}c"), None])
@pytest.mark.parametrize("start", [None, 30])
@pytest.mark.parametrize("budget", [0, 6])
def test_the_structure_follows_the_reasoning(
    spelled_engine: Any, text_of: Any, structure: StructuredOutput | None, start: int | None, budget: int
) -> None:
    """A bias makes EOS the most likely token, and the start of the reasoning more likely than others."""
    end = 31
    shape = {
        "max_tokens": 30, "temperature": 1.0, "seed": 3, "structured_output": structure,
        "logit_bias": {EOS: 8.0 if structure else -100.0, 30: 100.0 if start else 0.0, end: -100.0},
        "reasoning": Reasoning(end, start, budget),
    }  # fmt: skip
    engine = spelled_engine()
    request = request_of(1, [1, 9], **shape)
    result = run(engine, [request])[request.id]
    begun = int(start is not None)
    assert result.tokens[:begun] == [30] * begun
    assert EOS not in result.tokens[: begun + budget]
    assert result.tokens.index(end) == begun + budget, "the budget allows the end only"
    if structure is None:
        assert len(result.tokens) == 30
        return
    answer = result.tokens[begun + budget + 1 : -1]
    assert re.fullmatch("ab{2,4}c", text_of(answer))
    reasoned = begun + budget + 1
    for cut in {1, reasoned - 1, reasoned, reasoned + 1, len(result.tokens) - 1} - {0}:
        again = request_of(2, [1, 9], result.tokens[:cut], **shape)
        assert run(engine, [again])[again.id].tokens == result.tokens[cut:], cut


def test_a_model_that_does_not_reason_gives_the_structure_at_once(spelled_engine: Any, text_of: Any) -> None:
    request = request_of(
        1, [1, 9], logit_bias={30: -100.0}, max_tokens=30, reasoning=Reasoning(31, 30),
        structured_output=StructuredOutput("regex", "ab{2,4}c"),
    )  # fmt: skip
    result = run(spelled_engine(), [request])[request.id]
    assert re.fullmatch("ab{2,4}c", text_of(result.tokens[:-1]))


def test_a_step_waits_for_no_token_after_the_reasoning(
    late_engine: Any, spelled_engine: Any, spelled_path: Path
) -> None:
    """The request has a budget, and no structure."""
    shape = {"max_tokens": 20, "ignore_eos": True, "allowed_token_ids": (30, 31)}
    request = request_of(1, [1, 9], reasoning=Reasoning(31, budget=4), logit_bias={31: -100.0}, **shape)
    expected = run(spelled_engine(overlap=False), [request])[request.id].tokens
    assert expected[:5] == [30] * 4 + [31]
    engine = late_engine(model=str(spelled_path), num_blocks=64)
    engine.add(request)
    got: list[int] = []
    late: list[int] = []
    while engine.loop.has_work:
        got += [output.token for output in engine.loop.step().outputs]
        late += [len(got)] * any(not launched.is_sampled for _, launched in engine.loop.under_way)
    assert got == expected
    assert late
    assert max(late) <= 5, "a step waits for the token before it only while the request reasons"


@pytest.mark.all
def test_allowed_tokens_and_bad_words(spelled_engine: Any) -> None:
    """Also when an earlier worker generated a part of the output."""
    shape = {
        "temperature": 1.0, "ignore_eos": True, "max_tokens": 40, "allowed_token_ids": (30, 31, 32),
        "bad_words": ((30, 30), (31, 32, 31), (32, 32)),
    }  # fmt: skip
    engine = spelled_engine()
    for seed in range(2):
        request = request_of(seed, [1, 9, 30], seed=seed, **shape)
        tokens = run(engine, [request])[request.id].tokens
        assert set(tokens) == {30, 31, 32}
        spoken = "".join(map(chr, tokens))
        for word in shape["bad_words"]:
            assert "".join(map(chr, word)) not in spoken
        again = request_of(9, [1, 9, 30], tokens[:11], seed=seed, **shape)
        assert run(engine, [again])[again.id].tokens == tokens[11:]
    of_prompt = request_of(3, [1, 9, 30], max_tokens=1, allowed_token_ids=(30,), bad_words=((30, 30),))
    assert run(engine, [of_prompt])[of_prompt.id].tokens == [30], "a bad word is one of the output alone"


def test_fields_that_allow_no_token_fail_their_request_only(spelled_engine: Any, spelled_path: Path) -> None:
    letter = Tokenizer.from_file(str(spelled_path / "tokenizer.json")).token_to_id("b")
    engine = spelled_engine()
    engine.add(
        request_of(1, [1, 9], structured_output=StructuredOutput("regex", "a"), allowed_token_ids=(letter,))
    )
    engine.add(request_of(2, [1, 9], max_tokens=3))
    refused = {}
    while engine.loop.has_work:
        refused |= dict(engine.loop.step().refused)
    [message] = refused.values()
    assert "allow no token together" in message


@pytest.mark.all  # it reads the vocabulary of a GGUF file
def test_fixed_text_is_spelled_as_the_tokenizer_spells_it(shallow_model_path: Path) -> None:
    """From a GGUF file's vocabulary."""
    tokenizer = Tokenizer.from_str(tokenizer_json(str(shallow_model_path)))
    text = 'The temperature_celsius of {"Größe": "München"} is 12.5 degrees.'
    wanted = StructuredOutput("regex", re.escape(text))
    request = request_of(1, [1, 5], max_tokens=60, structured_output=wanted)
    live = LiveRequest(request, 1)
    grammars = Grammars(tokenizer_json, str(shallow_model_path), VOCABULARY, {EOS})
    live.grammar = grammars.compile(request)
    for expected in [*tokenizer.encode(text).ids, EOS]:
        mask, failed = grammars.allowed([(live.grammar, live.token_ids)])
        assert not failed
        assert mask is not None
        rows, bits = mask
        assert rows == [0]
        bits = np.unpackbits(bits.view(np.uint8), bitorder="little")
        assert bits.nonzero()[0].tolist() == [expected]
        live.token_ids.append(expected)
    grammars.close()


def test_a_mask_applies_to_its_rows_only_for_any_vocabulary() -> None:
    vocabulary = 45
    logits = torch.arange(3 * vocabulary, dtype=torch.float32).view(3, vocabulary)
    bits = np.zeros((2, 2), dtype=np.int32)
    bits[0, 0], bits[1, 1] = -(1 << 31), 1 << 3  # tokens 31 and 35
    live = [LiveRequest(request_of(i, [1]), i) for i in range(3)]
    adjustments = build_adjustments(live, {EOS}, ([0, 2], bits))
    chosen = adjust(logits, adjustments, torch.empty(0)).argmax(dim=-1)
    assert chosen.tolist() == [31, 44, 35]


def test_structured_output_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"structured_output\.regex must have 1 to"):
        StructuredOutput("regex", "a" * 200_000)
    with pytest.raises(ValueError, match="ignore_eos must be false with structured_output"):
        request_of(1, [1], ignore_eos=True, structured_output=StructuredOutput("regex", "a"))
