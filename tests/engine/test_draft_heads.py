"""Draft heads: MTP layers and EAGLE-3 change no stream, and their guesses are those of the reference."""

import os
import random
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import EngineConfig, EngineRequest, SamplingParams, SpeculativeConfig, build_engine
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.execution.warmup import Rehearsal, rehearse
from baton.engine.kernels import Kernels
from baton.engine.loader import check_model
from baton.worker.engine_process.paged_kv import kv_layout
from tests.device import DEVICE
from tests.engine.checkpoints import assert_refused, edited_tensors, load
from tests.engine.conftest import (
    LateEvent,
    MakeEngine,
    Result,
    TinyOf,
    request_of,
    run,
    save_spelled_tokenizer,
    save_tiny,
    tokens_of,
)
from tests.engine.draft_checkpoints import random_eagle, save_mtp, save_qwen_mtp, sure_eagle, sure_mtp
from tests.engine.draft_reference import EagleReference, NextTokenReference, QwenReference
from tests.engine.drafting import draft_always
from tests.engine.replays import capture_on_cpu, replayed
from tests.engine.scheduling import live_of
from tests.engine.test_engine import PREEMPTING
from tests.engine.test_speculation import assert_same, requests_of
from tests.engine.test_unequal_groups import ON_CPU, Pair, Side

Checkpoint = tuple[Path, dict[str, Any]]
"""The model, and the settings of its speculation."""


KINDS = "Llama", "Qwen3", "DeepseekV3", "Glm4MoeLite", "Lfm2", "Qwen3_5MoeText", "GlmMoeDsa"
"""Two with an EAGLE-3 head each, two with MTP layers, of the models with states one of each, and an index."""
RARE = "Glm4MoeLite", "Lfm2"  # others have their kinds of caches


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.long if kind in RARE else ()) for kind in KINDS],
)
def random_head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind in ("DeepseekV3", "Glm4MoeLite", "GlmMoeDsa"):
        save_mtp(directory, kind)
        save_spelled_tokenizer(directory)
        return directory, {"method": "mtp"}
    if kind.startswith("Qwen3_5"):
        save_qwen_mtp(directory, kind)
        save_spelled_tokenizer(directory)
        return directory, {"method": "mtp"}
    save_tiny(directory, kind)
    save_spelled_tokenizer(directory)
    head = tmp_path_factory.mktemp(f"{kind}-eagle")
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    random_eagle(head, directory, norm_before_residual=kind == "Qwen3", **taps)
    return directory, {"method": "eagle3", "model": str(head)}


@cache
def sure_head(directory: Path, method: str, *, wrong: bool) -> Checkpoint:
    """A model below `directory`, and a head that knows it, or one that is always wrong."""
    path, settings = directory / f"{method}-{wrong}", {"method": method.split()[0]}
    path.mkdir()
    if method.startswith("mtp"):
        sure_mtp(path, wrong=wrong, qwen=method == "mtp of qwen")
    else:
        settings["model"] = str(directory / f"head-{wrong}")
        sure_eagle(path, Path(settings["model"]), wrong=wrong)
    return path, settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `sure_head`."""
    return tmp_path_factory.mktemp("sure")


def some() -> list[EngineRequest]:
    """Of `requests_of` some of each kind: `test_speculation` has all of them."""
    return requests_of()[::3]


@pytest.fixture(scope="module")
def expected(tiny_engine: MakeEngine, random_head: Checkpoint) -> dict[bytes, Result]:
    return run(tiny_engine(model=str(random_head[0]), num_blocks=512), some())


PREEMPTION = {**PREEMPTING, "num_blocks": 24}
PREFIXES: dict[str, Any] = {"block_size": 2, "enable_prefix_caching": True, "num_blocks": 512}


@pytest.mark.all
@pytest.mark.parametrize(
    ("random_head", "config", "overlap"),
    [
        pytest.param(kind, config, overlap, id=f"{kind}-{name}", marks=() if quick else pytest.mark.long)
        for name, config, cases in (
            ("preemption", PREEMPTION, ((1, 1), (0, 0), (1, 0), (0, 1), (0, 1), (1, 1), (0, 1))),
            ("prefix cache", PREFIXES, ((0, 1), (1, 0), (0, 1), (0, 1), (0, 0), (1, 0), (1, 1))),
        )
        for kind, (quick, overlap) in zip(KINDS, cases, strict=True)
    ],
    indirect=["random_head"],
)
def test_drafts_change_no_stream(
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    random_head: Checkpoint,
    expected: dict[bytes, Result],
    config: dict[str, Any],
    overlap: int,
) -> None:
    """Each method without long tests: with overlap and without, with preemptions and with the cache."""
    path, settings = random_head
    engine = (late_engine if overlap else tiny_engine)(
        model=str(path), speculative_config=SpeculativeConfig(num_speculative_tokens=3, **settings), **config
    )
    draft_always(engine)
    for _ in range(2 if "enable_prefix_caching" in config else 1):  # then with prompts from the cache
        assert_same(run(engine, some()), expected)
        engine.assert_whole()
    stats = engine.stats()
    assert stats.speculation is not None
    assert stats.speculation.drafts
    assert bool(stats.preemptions) == (engine.num_blocks == 24)


@pytest.mark.all
@ON_CPU
def test_an_engine_on_the_kernels_of_a_gpu(
    triton_kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter, which watches their memory: steps overlap, graphs replay them, and requests share
    the keys of their drafts."""
    model, head = tmp_path / "model", tmp_path / "head"
    save_tiny(model, "Llama", head_dim=16, num_attention_heads=8)
    random_eagle(head, model, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    requests = [request_of(i, range(3, 14 + 9 * i), max_tokens=4, ignore_eos=True) for i in range(2)]
    config = EngineConfig(str(model), dtype="float32", device="cpu", num_blocks=16, max_num_seqs=2)
    expected = tokens_of(build_engine(config), requests)
    for module in ("baton.engine.execution.start", "baton.engine.layers.weights"):
        monkeypatch.setattr(f"{module}.kernels_for", lambda device, head_dim, exact=False: triton_kernels)
    wanted = SpeculativeConfig("eagle3", model=str(head), num_speculative_tokens=3)
    engine = build_engine(replace(config, overlap=True, cuda_graphs=True, speculative_config=wanted))
    monkeypatch.setattr(engine.runner, "_record", LateEvent)
    monkeypatch.setattr(engine.loop._landings, "expect", lambda event: None)
    capture_on_cpu(engine, monkeypatch, chunk_sizes=[32])
    graphs = engine.runner._graphs
    assert graphs is not None
    work = graphs._widths.tiles.work([(0, 32)], 4)
    for staging in graphs._staging:  # as a step with a prompt leaves them
        staging.put({"tiles": work, "block_tables": np.zeros((1, 1), np.int32)})
    draft_always(engine)
    assert tokens_of(engine, requests) == expected
    assert replayed(engine)


@pytest.mark.all
def test_guesses_are_those_of_the_reference(
    tiny_engine: MakeEngine,
    random_head: Checkpoint,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After prompts in chunks, and after each step with drafts that are rarely right. One kind of each method
    has graphs on a CPU: three requests are padded to four, and their rows to 8 or 16."""
    import transformers

    path, settings = random_head
    graphs = DEVICE == "cpu" and KINDS.index(request.node.callspec.params["random_head"]) % 2 == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    of_kind = QwenReference if "Qwen3_5" in str(path) else NextTokenReference
    reference = (
        EagleReference(model, Path(settings["model"])) if "model" in settings else of_kind(model, path)
    )
    engine = tiny_engine(
        model=str(path),
        max_num_batched_tokens=16,
        max_num_seqs=4,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3, **settings),
    )
    if graphs:
        capture_on_cpu(engine, monkeypatch)
    draft_always(engine)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation._acceptance = lambda live: 1.0
    lives: list[LiveRequest] = []
    for number, length in enumerate((40, 9, 23)):
        prompt = [(7 * i + number) % 190 + 3 for i in range(length)]
        # In this order no prompt ends with full blocks as it gets guesses: a guess without a place takes the
        # last one of its request, and later ones may be worse for it (`DraftRunner`).
        asked = request_of(number, prompt, max_tokens=12 + 3 * number, ignore_eos=True, priority=number)
        engine.add(asked)
        lives.append(live_of(engine, asked.id))
    guessed: list[tuple[LiveRequest, int, list[int]]] = []
    while engine.loop.has_work:
        engine.loop.step()
        for live in lives:
            if live.guesses.position == live.num_known and live.phase is Phase.RUNNING:
                # Guess i has position num_known − 2 + i. Without a place there it may be worse.
                count = min(len(live.guesses.tokens), 4 * len(live.blocks) - live.num_known + 2)
                guessed.append((live, live.num_known, list(live.guesses.tokens[:count])))
    engine.assert_whole()
    for live in lives:
        ids = list(live.token_ids)
        reference.read(ids)
        for known, guesses in (each[1:] for each in guessed if each[0] is live):
            assert guesses == reference.guesses(ids[:known], len(guesses))
    assert sum(len(guesses) for *_, guesses in guessed) > 60
    if graphs:
        # Drafts of models with states are computed as prompts are, which have no graphs here.
        assert replayed(engine) > (0 if engine.lives.states else 20)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("method", "wrong", "mode", "count"),
    [
        ("mtp", False, "", 3),
        ("mtp", True, "overlap", 3),
        ("eagle3", True, "", 1),
        ("eagle3", False, "overlap", 1),
        ("mtp of qwen", False, "overlap", 3),
        ("mtp of qwen", True, "", 1),
        pytest.param("mtp", False, "overlap, graphs", 1, marks=ON_CPU),
        pytest.param("mtp", True, "overlap, graphs", 3, marks=ON_CPU),
        pytest.param("eagle3", False, "overlap, graphs", 3, marks=ON_CPU),
    ],
)
def test_a_head_that_knows_the_model_is_always_right(
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    directory: Path,
    method: str,
    wrong: bool,
    mode: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one draft and with three."""
    path, settings = sure_head(directory, method, wrong=wrong)
    requests = [request_of(n, [3 + n, 9, 4], max_tokens=22, ignore_eos=True) for n in range(3)]
    expected = run(tiny_engine(model=str(path)), requests)
    engine = (late_engine if mode else tiny_engine)(
        model=str(path),
        max_num_seqs=4,  # fewer sizes of graphs than by default
        speculative_config=SpeculativeConfig(num_speculative_tokens=count, **settings),
    )
    if "graphs" in mode:
        capture_on_cpu(engine, monkeypatch)
    draft_always(engine)
    results = run(engine, requests)
    assert_same(results, expected)
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.drafts > (10 if wrong else 20)
    assert stats.accepted == (0 if wrong else stats.drafts)
    outputs = [output for result in results.values() for output in result.outputs]
    assert sum(output.accepted_draft for output in outputs) == stats.accepted
    assert sum(output.rejected_drafts for output in outputs) == stats.drafts - stats.accepted


@pytest.mark.all
@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        ("mtp", (1, 1)),
        ("mtp of qwen", (1, 1)),
        pytest.param("eagle3", (2, 1), marks=ON_CPU),
        pytest.param("mtp", (1, 2), marks=ON_CPU),
        pytest.param("eagle3", (1, 2), marks=ON_CPU),
    ],
)
def test_the_cache_of_a_head_is_handed_over(directory: Path, method: str, ranks: tuple[int, int]) -> None:
    """Bit for bit (`Pair`). The decode engine goes on with drafts, which are right."""
    path, settings = sure_head(directory, method, wrong=False)
    with_head = {"speculative_config": SpeculativeConfig(num_speculative_tokens=3, **settings)}
    layout = kv_layout(load(path, num_blocks=8, **with_head))
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 60) for _ in range(n)] for n in (1, 17, 64, 150)]
    prompts += [[*prompts[-1][:130], *prompts[1]]]
    sampling = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    requests = [EngineRequest(os.urandom(16), prompt, [], sampling) for prompt in prompts]
    expected = tokens_of(load(path, device=DEVICE, num_blocks=60), requests)
    common: dict[str, Any] = {"enable_prefix_caching": True, **with_head}
    prefill = Side(path, layout, ranks[0], block_size=16, num_blocks=60, max_num_batched_tokens=50, **common)
    decode = Side(path, layout, ranks[1], block_size=64, num_blocks=30, **common)
    draft_always(decode.engine)
    with closing(prefill), closing(decode):
        pair = Pair(prefill, decode)
        assert pair.run(requests[:-1]) + pair.run(requests[-1:]) == expected
        stats = decode.engine.stats().speculation
        assert stats is not None
        assert stats.accepted == stats.drafts > 40


def test_heads_that_do_not_fit_are_refused(tmp_path: Path, tiny_of: TinyOf) -> None:
    target, head = tiny_of("Llama"), tmp_path / "head"
    settings = {"speculative_config": SpeculativeConfig("eagle3", model=str(head))}
    taps: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    random_eagle(head, target, **taps)
    check_model(EngineConfig(str(target), **settings))
    with edited_tensors(head) as tensors:
        tensors["more"] = torch.zeros(2)
    assert_refused(target, "1 tensors are unknown to LlamaForCausalLM, such as model.more", **settings)
    for changes, message in (
        ({}, r"eagle_aux_hidden_state_layer_ids \[2, 1, 0\] must be layers in ascending order"),
        (
            {**taps, "num_key_value_heads": 4},
            r"KV heads and their size is \(4, 16\), but \(2, 16\) in the model",
        ),
        ({**taps, "vocab_size": 200}, "vocab_size is 200, but 199 in the model; choose a head for it"),
        ({**taps, "target_hidden_size": 32}, "target_hidden_size is 32, but 64 in the model"),
        ({**taps, "num_hidden_layers": 2}, "only heads with one layer"),
        ({**taps, "architectures": ["Eagle3Speculator"]}, "Eagle3Speculator is no EAGLE-3 head"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "must be layers of the model, 0 to 2"),
    ):
        random_eagle(head, target, **changes)
        assert_refused(target, message, **settings)
    mtp = SpeculativeConfig("mtp")
    assert_refused(target, "has no layer that predicts further tokens", speculative_config=mtp)
    for kind in ("Bamba", "Qwen3_5Text"):
        assert_refused(tiny_of(kind), "has no layer that predicts further tokens", speculative_config=mtp)


def test_a_worker_with_another_head_is_refused_by_its_fingerprint(
    tmp_path: Path, tiny_of: TinyOf, tiny_engine: MakeEngine
) -> None:
    target, fingerprints = tiny_of("Llama"), []
    for name, changes in (("a", {}), ("b", {}), ("c", {"norm_before_residual": True})):
        random_eagle(tmp_path / name, target, eagle_aux_hidden_state_layer_ids=[0, 1, 2], **changes)
        wanted = SpeculativeConfig("eagle3", model=str(tmp_path / name))
        fingerprints.append(tiny_engine(model=str(target), speculative_config=wanted).model_fingerprint)
    plain = tiny_engine(model=str(target)).model_fingerprint
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert [each.rpartition("; drafts=eagle3 ")[0] for each in fingerprints] == [plain] * 3


def test_the_steps_before_the_first_request_have_guesses(
    tiny_engine: MakeEngine, random_head: Checkpoint
) -> None:
    """A GPU measures and compiles with these."""
    path, settings = random_head
    engine = tiny_engine(
        model=str(path),
        max_num_seqs=4,
        max_num_batched_tokens=24,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3, **settings),
    )
    config = EngineConfig(
        str(path),
        max_num_seqs=4,
        max_num_batched_tokens=24,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3, **settings),
    )
    num_slots = 4 if engine.lives.states else 0
    rehearsal = Rehearsal(config, 64, 4, pool=engine.num_blocks, num_slots=num_slots)
    guessed = [step.drafting.count * len(step.drafting.first_rows) for step in rehearsal.steps(None)]
    assert max(guessed) == 4 * 3
    assert any(rehearse(engine.runner, rehearsal, lambda done: None))
