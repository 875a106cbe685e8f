"""New weights in place: an engine computes as one that began with them, and an error changes nothing."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.engine import Engine, SpeculativeConfig
from baton.engine.core.live_request import Phase
from baton.engine.layers import fp8_linear
from baton.engine.layers.in_place import pairs
from baton.engine.layers.pieces import pieces
from baton.engine.loader import int4_on_load
from baton.engine.loader.live_weights import LoadedModel, NewWeights
from baton.weights import Checkpoint, Memory
from tests.device import DEVICE
from tests.engine.checkpoints import edit_json, edited_tensors, load
from tests.engine.conftest import request_of, run, tokens_of
from tests.engine.draft_checkpoints import save_mtp
from tests.engine.random_checkpoints import save_random

PROMPTS = [3, 5, 7, 11] * 9, [13, 17, 19]


def trained(path: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint with other values in each tensor."""
    copy = shutil.copytree(path, tmp_path / "trained")
    with edited_tensors(copy) as tensors:
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.copy_((tensor.flatten().roll(1) * 1.25).view(tensor.shape))
    return copy


def answers(engine: Engine) -> Sequence[Any]:
    requests = [request_of(i, p, max_tokens=8, ignore_eos=True, logprobs=3) for i, p in enumerate(PROMPTS)]
    results = run(engine, requests)
    engine.assert_whole()
    return [(result.tokens, [output.logprobs for output in result.outputs]) for result in results.values()]


KINDS = [
    pytest.param("Llama", {}, {}, marks=pytest.mark.long),
    ("Llama", {"tie_word_embeddings": True}, {"quantization": "int4"}),
    ("Qwen3", {}, {"quantization": "int4"}),
    ("Gemma3Text", {}, {}),
    ("GptOss", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, {}),
    pytest.param("Llama4Text", {}, {}, marks=pytest.mark.long),
    ("Qwen3Moe", {}, {"dtype": "bfloat16"}),
    ("DeepseekV3", {}, {}),
    ("Qwen3_5Text", {}, {}),
    *(
        pytest.param(kind, {}, {}, marks=pytest.mark.long)
        for kind in ("DeepseekV32", "Bamba", "KimiLinear", "Lfm2", "NemotronH")
    ),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "changes", "settings"), KINDS)
def test_new_weights_take_the_place_of_all_that_derives_from_them(
    kind: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    one_form: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.engine.layers.pieces.PIECE", 1000)  # a GPU has many of each tensor then
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, kind, **changes)
    after = trained(before, tmp_path)
    fresh = load(after, device=DEVICE, num_blocks=16, **settings)
    engine = load(before, device=DEVICE, num_blocks=16, **settings)
    first, root, fingerprint = answers(engine), engine.content_root, engine.model_fingerprint
    staged = engine.stage_weights(str(after))
    assert answers(engine) == first, "what is only staged changes nothing"
    engine.replace_weights(staged, "1")
    wanted = answers(fresh)
    assert wanted != first
    assert answers(engine) == wanted
    assert engine.content_root not in (root, fresh.content_root), "no name of KV is that of other weights"
    assert engine.model_fingerprint not in (fingerprint, fresh.model_fingerprint)
    engine.replace_weights(engine.stage_weights(str(before)), "2")
    assert answers(engine) == first


@pytest.mark.parametrize("tied", [False, True])
def test_no_part_stays_on_the_device_while_others_are_read(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Llama", tie_word_embeddings=tied)
    engine = load(before, device=DEVICE, num_blocks=16)
    moved = list[tuple[str, bool]]()

    def on_host(loaded: LoadedModel, kept: Any, new: Any, name: str) -> Any:
        found = keep(loaded, kept, new, name)
        moved.append((name, bool(found)))
        return found

    keep = LoadedModel._on_host
    monkeypatch.setattr(LoadedModel, "_on_host", on_host)
    engine.stage_weights(str(trained(before, tmp_path)))
    layers = [(f"layers.{i}", True) for i in range(engine.model_config.num_layers)]
    embedding = [] if tied else [("embedding", True)]
    assert moved[:-3] == [*embedding, ("head", True), *layers]


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_rounding_takes_a_few_rows_at_once(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(tmp_path, "Llama")
    settings = {"device": DEVICE, "num_blocks": 16, "quantization": quantization}
    if DEVICE == "cuda" and quantization == "fp8":  # such products are in no other dtype there
        settings["dtype"] = "bfloat16"
    whole = answers(load(tmp_path, **settings))
    rounding, name = {"fp8": (fp8_linear, "quantize"), "int4": (int4_on_load, "rounded")}[quantization]
    most = 2000
    sizes, real = list[int](), getattr(rounding, name)

    def noted(x: torch.Tensor, *args: Any, **settings: Any) -> Any:
        sizes.append(x.nbytes)
        return real(x, *args, **settings)

    monkeypatch.setattr(rounding, name, noted)
    monkeypatch.setattr("baton.engine.layers.pieces.PIECE", most)
    in_pieces = load(tmp_path, **settings)
    assert max(sizes) <= most
    assert answers(in_pieces) == whole


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_device_has_room_for_the_largest_part(quantization: str, tmp_path: Path) -> None:
    shape = {"vocab_size": 1 << 18, "hidden_size": 256, "intermediate_size": 32768, "num_hidden_layers": 8}
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Llama", **shape, max_position_embeddings=8192)
    settings = {"dtype": "bfloat16", "num_blocks": 16, "quantization": quantization}
    engine = load(before, device=DEVICE, **settings)
    after = trained(before, tmp_path)
    torch.cuda.empty_cache()
    reserved, largest = torch.cuda.memory_reserved(), 2 * 256 << 18
    torch.cuda.reset_peak_memory_stats()
    engine.stage_weights(str(after))
    assert torch.cuda.max_memory_reserved() - reserved <= 1.3 * largest


def test_the_head_that_drafts_changes_too(tmp_path: Path, one_form: None) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_mtp(before, "DeepseekV3")
    after = trained(before, tmp_path)
    config = {"device": DEVICE, "num_blocks": 16, "speculative_config": SpeculativeConfig("mtp")}
    fresh, engine = load(after, **config), load(before, **config)
    engine.replace_weights(engine.stage_weights(str(after)), "1")
    found = pairs(engine.loaded.drafter, fresh.loaded.drafter)
    same = [torch.equal(*(x.to_dense() if x.is_mkldnn else x for x in (a, b))) for _, a, b in found]
    assert same
    assert all(same)
    # The clock decides how many drafts a step has, and its rows decide how a logarithm is rounded.
    assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in answers(fresh)]


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"), "mlp.up_proj.weight is missing"),
        (lambda tensors: tensors.update(other=torch.ones(2)), "1 tensors are unknown to .*, such as other"),
        (cut, r"model.norm.weight is \[63\], by the model's configuration it should be \[64\]"),
        (not_finite, r"model.layers.1.mlp.up_proj.weight has values that are not finite"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(edit: Any, message: str, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Llama")
    engine = load(before, device=DEVICE, num_blocks=16)
    first, root = answers(engine), engine.content_root
    after = trained(before, tmp_path)
    with edited_tensors(after) as tensors:
        edit(tensors)
    with pytest.raises(ValueError, match=message):
        engine.stage_weights(str(after))
    assert answers(engine) == first
    assert engine.content_root == root


@pytest.mark.parametrize(
    ("kept", "new", "message"),
    [
        ([0.5], [0.25], r"model\.0 is 0\.5 and would be 0\.25: it cannot change in place"),
        ({"a": [torch.zeros(2)]}, {"a": (torch.ones(2),)}, r"model\.a is a list and would be a tuple"),
        ([torch.zeros(2)], [torch.ones(3)], r"model\.0 is \[2\] of torch\.float32 and would be \[3\]"),
        ([torch.zeros(2)], [torch.ones(2).half()], r"would be \[2\] of torch\.float16"),
        ({"a": torch.zeros(2)}, {}, r"model\.a is missing in the new weights"),
    ],
)
def test_what_differs_in_more_than_values_is_refused(kept: Any, new: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(pairs(kept, new))


def test_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Llama")
    engine = load(before, device=DEVICE, num_blocks=16)
    edit_json(trained(before, tmp_path) / "config.json", rms_norm_eps=0.25)
    with pytest.raises(ValueError, match=r"another model than the one that is loaded: rms_norm_eps 0\.25"):
        engine.stage_weights(str(tmp_path / "trained"))
    with pytest.raises(ValueError, match="no such file or directory on the host of this worker"):
        engine.stage_weights(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no such file or directory on .*; give an absolute path"):
        engine.stage_weights("nowhere")


@pytest.mark.all
@pytest.mark.parametrize("kind", ["Llama", "Qwen3_5Text"])
def test_a_request_that_decodes_keeps_its_kv_and_no_other_one_gets_it(
    kind: str, tmp_path: Path, one_form: None
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, kind)
    after = trained(before, tmp_path)
    settings: dict[str, Any] = {"device": DEVICE, "num_blocks": 32, "enable_prefix_caching": True}
    fresh, engine = load(after, **settings), load(before, **settings)
    kept = request_of(1, [3, 5, 7, 11] * 20, max_tokens=100, ignore_eos=True)
    [old] = tokens_of(engine, [kept])
    live = engine.start(kept)
    assert live is not None
    found: list[int] = []
    while len(found) < 20:
        found += [output.token for output in engine.loop.step().outputs]
    engine.loop.frozen = True
    while engine.loop.has_work:
        found += [output.token for output in engine.loop.step().outputs]
    assert found == old[: len(found)]
    blocks = list(live.blocks)
    engine.replace_weights(engine.stage_weights(str(after)), "1")
    engine.loop.frozen = False
    while engine.loop.has_work:
        step = engine.loop.step()
        assert not step.prompts, "nothing of it is computed again"
        found += [output.token for output in step.outputs]
        assert live.phase is Phase.GONE or list(live.blocks)[: len(blocks)] == blocks
    assert len(found) == 100
    assert found != old
    tokens = [*kept.prompt_ids, *found]
    for number, count in enumerate((80 + 40, len(tokens)), 2):  # the second one finds what the first one left
        request = request_of(number, tokens[:count], max_tokens=4, ignore_eos=True, logprobs=3)
        [new], [wanted] = (run(each, [request]).values() for each in (engine, fresh))
        assert new.outputs[0].cached_tokens == wanted.outputs[0].cached_tokens
        assert (new.tokens, [o.logprobs for o in new.outputs]) == (
            wanted.tokens,
            [o.logprobs for o in wanted.outputs],
        )
    engine.assert_whole()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((1 << 10,), (1,)), ((1, 64, 40), (0, 40, 1)), ((40, 64), (1, 40)), ((3, 5, 7), (35, 7, 1)), ((), ())],
)
def test_pieces_are_small_and_whole_parts_of_memory(
    shape: tuple[int, ...], strides: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.layers.pieces.PIECE", 256)
    values = torch.arange(math.prod(shape)).as_strided(shape, strides)
    copy, other = torch.zeros_like(values), torch.zeros(shape, dtype=torch.int64)
    for to, also, some in pieces(copy, other, values):
        assert some.nbytes <= 256
        ends = [(size - 1) * stride for size, stride in zip(some.shape, some.stride(), strict=True)]
        assert sum(ends) == some.numel() - 1, "nothing else is between its elements"
        to.copy_(some)
        also.copy_(some)
    assert copy.equal(values)
    assert other.equal(values)


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", ["shm", "memfd"])
def test_weights_of_a_trainer_come_through_memory_whole_or_in_shards(
    memory: Memory, tmp_path: Path, one_form: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.weights.LEAST_FILE", 1 << 14)
    monkeypatch.setattr("baton.weights.PIECE", 1000)
    monkeypatch.setattr("baton.weights.usable_cpus", lambda: 3)
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Llama", tie_word_embeddings=True)
    after = trained(before, tmp_path)
    state = dict(load_file(after / "model.safetensors"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied, so a state_dict has it twice
    fused = torch.cat(
        [state["model.layers.0.mlp.gate_proj.weight"], state["model.layers.0.mlp.up_proj.weight"]]
    )
    gate, up = fused.chunk(2)
    state |= {"model.layers.0.mlp.gate_proj.weight": gate, "model.layers.0.mlp.up_proj.weight": up}
    fresh = load(after, device=DEVICE, num_blocks=16)
    engine = load(before, device=DEVICE, num_blocks=16)
    for shards in (1, 2):
        checkpoint = Checkpoint(tmp_path / f"update-{shards}", before, memory)
        names = list(state)
        for shard in range(shards):
            some = names[shard::shards] if shards > 1 else names
            if shard and "lm_head.weight" in some:
                some.remove("lm_head.weight")
            checkpoint.write({name: state[name] for name in some}, shard, shards)
        files = [*checkpoint.directory.glob("*.safetensors")]
        assert len(files) == 3 * shards
        assert max(f.stat().st_size for f in files) < 2 * min(f.stat().st_size for f in files)
        staged = engine.stage_weights(str(checkpoint.directory))
        checkpoint.remove()
        engine.replace_weights(staged, str(shards))
        assert answers(engine) == answers(fresh)


@pytest.mark.all
@pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads here")
@pytest.mark.parametrize("kind", ["Llama", pytest.param("Qwen3Moe", marks=pytest.mark.long)])
def test_each_rank_takes_its_part_or_none_does(
    kind: str, tmp_path: Path, ranks: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, kind)
    after = trained(before, tmp_path)
    requests = [request_of(i, p, max_tokens=8, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    engine = ranks(before, 2, block_size=16)
    old, root = tokens_of(engine, requests), engine.content_root
    wanted = tokens_of(load(after, num_blocks=64), requests)
    stage = LoadedModel.stage

    def fails(loaded: LoadedModel, path: str) -> NewWeights:
        if loaded.ranks.rank:
            raise ValueError("the host of this rank has no such file")
        return stage(loaded, path)

    monkeypatch.setattr(LoadedModel, "stage", fails)
    with pytest.raises(ValueError, match="rank 1: the host of this rank has no such file"):
        engine.stage_weights(str(after))
    engine.drop_weights()
    assert tokens_of(engine, requests) == old
    assert engine.content_root == root
    monkeypatch.undo()
    staging = engine.staging(str(after))
    assert tokens_of(engine, requests) == old, "steps go on"
    engine.replace_weights(staging(), "1")
    assert tokens_of(engine, requests) == wanted != old
