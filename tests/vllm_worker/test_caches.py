"""vLLM's cache tensors, as KV transfer sees them."""

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kv_names.cache_kinds import LATENT, STATE, CacheArray, Window
from baton.vllm_worker.caches import Caches, Heads, caches_of, clear_rest, clear_states, layer_place
from baton.vllm_worker.metadata import Begun, BlockTable, block_ids
from tests.layouts import kv_layout
from tests.vllm_worker.groups import attention, group

pytestmark = pytest.mark.all

BLOCKS, BLOCK, HEADS, DIM = 5, 16, 3, 8
NAMES = "model.layers.0.attn", "model.layers.1.attn"


def found_in(cache: torch.Tensor, of_group: Any, heads: Heads | None = None) -> Caches:
    return caches_of({NAMES[0]: cache}, [of_group], BLOCKS, heads or Heads(HEADS))


def full(*names: str, block: int = BLOCK) -> Any:
    return attention(*names, block=block, heads=HEADS, dim=DIM)


def test_on_cpus_keys_are_transposed() -> None:
    """As `cpu_attn_reshape_and_cache` of vLLM 0.32 writes them."""
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    flat = cache.view(BLOCKS, HEADS, 2, BLOCK * DIM)
    token, head = 11, 2
    for i in range(DIM):
        flat[3, head, 0, i * BLOCK + token] = 1 + i
        flat[3, head, 1, token * DIM + i] = 100 + i
    caches = {NAMES[1]: cache, NAMES[0]: torch.zeros_like(cache)}
    found = caches_of(caches, [full(*NAMES)], BLOCKS, Heads(HEADS))
    assert found.kv.layout == kv_layout(2, HEADS, DIM, "float32")
    assert found.layers == {NAMES[0]: 0, NAMES[1]: 1}
    [[[_, (keys, values)]]] = found.kv.planes  # in the order of layers
    assert keys[3, token, head].tolist() == [1 + i for i in range(DIM)]
    assert values[3, token, head].tolist() == [100 + i for i in range(DIM)]
    assert keys.count_nonzero() == values.count_nonzero() == DIM


def test_what_lies_behind_a_fetched_prompt_is_cleared() -> None:
    """Up to the end of vLLM's block, which has two blocks of the kernel. States and other bytes stay."""
    caches = {name: torch.full((2 * BLOCKS, HEADS, BLOCK // 2, 2 * DIM), 1.0) for name in NAMES}
    unknown = "model.layers.2.attn"
    caches[unknown] = torch.ones(BLOCKS, BLOCK, 4)
    new = attention(unknown, block=BLOCK, heads=1, dim=4)
    new.kv_cache_spec.__class__ = type("NewSpec", (SimpleNamespace,), {})
    groups = [full(NAMES[0]), full(NAMES[1]), new]
    found = caches_of(caches, groups, BLOCKS, Heads(HEADS))
    clear_rest(found, Begun([[3, 1], [2, 4], [1, 3]], BLOCK))
    assert all(cache.all() for cache in caches.values()), "its blocks are full"
    clear_rest(found, Begun([[3, 1], [2, 4], [1, 3]], BLOCK + 3))
    rest = BLOCK - 3
    for block, [keys, values] in zip([1, 4], found.kv.planes[0][0], strict=True):
        for rows in (keys, values):
            ones = torch.ones(2 * BLOCKS, BLOCK // 2, HEADS, DIM)
            ones[2 * block, 3:] = ones[2 * block + 1] = 0
            assert torch.equal(rows, ones)
            assert (rows == 0).sum() == rest * HEADS * DIM
    assert caches[unknown].all()


@pytest.mark.parametrize("shape", [(BLOCKS, BLOCK, DIM), (BLOCKS, 1, BLOCK, DIM)], ids=str)
def test_latents_are_one_row_that_is_cut_into_heads(shape: tuple[int, ...]) -> None:
    cache = torch.arange(BLOCKS * BLOCK * DIM, dtype=torch.float32).view(shape)
    of_group = attention(NAMES[0], block=BLOCK, heads=1, dim=DIM, kind="MLAAttentionSpec")
    kv = found_in(cache, of_group, Heads(1, DIM // 2)).kv
    assert kv.layout == kv_layout(1, 2, DIM // 2, "float32", kind=LATENT)
    [[[[latents]]]] = kv.planes
    assert torch.equal(latents[3, 11].flatten(), cache[3].view(BLOCK, DIM)[11])


def test_states_are_the_bytes_of_a_page_without_its_padding() -> None:
    """As vLLM 0.26 has them, a tensor for each state, as 0.28, whole pages, and as 0.32, all bytes."""
    shapes, dtypes, page = ((4, 4), (2, 4)), (torch.bfloat16, torch.float32), 128
    memory = torch.arange(BLOCKS * page, dtype=torch.int64).to(torch.uint8)
    states = [
        torch.as_strided(memory.view(torch.bfloat16), (BLOCKS, 4, 4), (page // 2, 4, 1)),
        torch.as_strided(memory[32:].view(torch.float32), (BLOCKS, 2, 4), (page // 4, 4, 1)),
    ]
    padded = memory.view(torch.int8).view(BLOCKS, 1, 1, page)
    whole = padded[..., :64]
    spec = group("MambaSpec", NAMES[0], block_size=64, shapes=shapes, dtypes=dtypes)
    for cache in (states, padded, whole):
        kv = caches_of({NAMES[0]: cache}, [spec], BLOCKS, Heads(HEADS, rank=1, ranks=2)).kv
        assert kv.layout.arrays == (CacheArray(STATE, "state", 1, 2, 16, "float32"),)
        assert kv.heads == [(1, 2)], "each rank has its own"
        [[[rows]]] = kv.planes
        assert torch.equal(rows[0][3].reshape(-1).view(torch.uint8), memory[3 * page : 3 * page + 64])


def test_the_states_of_a_request_without_any_are_cleared() -> None:
    """In the block with those after its first token. Other blocks, padding and KV stay."""
    mixers = "model.layers.2.mixer", "model.layers.3.mixer"
    caches = {name: torch.full((BLOCKS, 1, 1, 32), 7, dtype=torch.int8) for name in mixers}
    caches[NAMES[0]] = torch.ones(BLOCKS, HEADS, BLOCK, 2 * DIM)
    shapes, dtypes = ((2, 4), (3,)), (torch.bfloat16, torch.float32)
    states = [group("MambaSpec", name, block_size=64, shapes=shapes, dtypes=dtypes) for name in mixers]
    found = caches_of(caches, [states[0], full(NAMES[0]), states[1]], BLOCKS, Heads(HEADS))
    clear_states(found, [[3, 1], [2], [4]])
    assert caches[NAMES[0]].all()
    for name, slot in zip(mixers, [3, 4], strict=True):
        expected = torch.full((BLOCKS, 1, 1, 32), 7, dtype=torch.int8)
        expected[slot, ..., :28] = 0
        assert torch.equal(caches[name], expected)


def test_groups_have_tables_of_their_own() -> None:
    """A kernel cuts the blocks of the last group into two. States have one slot."""
    windows = attention(
        NAMES[0], block=BLOCK, heads=HEADS, dim=DIM, kind="SlidingWindowSpec", sliding_window=20
    )
    small = torch.zeros(2 * BLOCKS, HEADS, BLOCK, 2 * DIM)
    states = group(
        "MambaSpec", "model.layers.2.mixer", block_size=64, shapes=((8,),), dtypes=(torch.float32,)
    )
    caches = {
        NAMES[0]: torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM), NAMES[1]: small,
        "model.layers.2.mixer": torch.zeros(BLOCKS, 1, 1, 32, dtype=torch.int8),
    }  # fmt: skip
    found = caches_of(caches, [windows, full(NAMES[1], block=2 * BLOCK), states], BLOCKS, Heads(HEADS))
    assert found.tables == [
        BlockTable(BLOCK, window=Window(20, tile=1)),
        BlockTable(2 * BLOCK, pieces=2),
        BlockTable(64, states=True),
    ]
    assert [array.window for array in found.kv.layout.arrays] == [Window(20, tile=1), None, None]
    assert found.kv.tables == [{0: 0}, {1: 1}, {2: 2}]
    ids = block_ids(found.tables, [[0, 4, 3], [2, 1], [0, 6]], 70)
    assert ids == [0, 4, 3, 0, 0, 0, 4, 5, 2, 3, 0, 0, 6, 0, 0, 0, 0, 0]
    assert block_ids(found.tables, [[0, 4], [2, 1], [7]], 33)[8:] == [7, 0, 0, 0]


def test_a_kind_that_is_not_known_is_blocks_of_bytes() -> None:
    """Blocks behind a window are not sent."""
    kind = "SlidingWindowMLASpec"
    of_group = attention(NAMES[0], block=BLOCK, heads=1, dim=33, kind=kind, sliding_window=20)
    cache = torch.arange(BLOCKS * BLOCK * 12, dtype=torch.int64).to(torch.uint8).view(BLOCKS, 1, BLOCK, 12)
    kv = found_in(cache, of_group).kv
    [array] = kv.layout.arrays
    assert (array.head_bytes, array.block, array.window) == (12, BLOCK, Window(20, tile=1))
    assert list(array.read_of([(0, 70)], [70])) == [(48, 80)], "full blocks"
    [[[rows]]] = kv.planes
    assert torch.equal(rows[0][3].reshape(-1).view(torch.uint8), cache[3].flatten())


def test_a_layer_that_reads_the_cache_of_another_one_is_sent_once() -> None:
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    for names in (NAMES, NAMES[:1]):  # vLLM may name it in the group
        kv = caches_of(dict.fromkeys(NAMES, cache), [full(*names)], BLOCKS, Heads(HEADS)).kv
        assert kv.layout.layers == ((0,),)
    with pytest.raises(ValueError, match=re.escape("no group for the caches of model.layers.1.attn")):
        caches_of({NAMES[0]: cache, NAMES[1]: cache.clone()}, [full(NAMES[0])], BLOCKS, Heads(HEADS))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(BLOCKS, BLOCK, HEADS, DIM), r"shape [5, 16, 3, 8]"),
        (torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8), "--kv-cache-dtype auto"),
    ],
)
def test_what_is_not_known_is_refused(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        found_in(cache, full(NAMES[0]))


def test_states_that_may_be_in_another_block_are_refused() -> None:
    for mode in ("none", "align", "all", "new"):
        kept = {"block_size": 64, "shapes": ((8,),), "dtypes": (torch.float32,), "mamba_cache_mode": mode}
        spec = group("MambaSpec", NAMES[0], **kept)
        expected = pytest.raises(ValueError, match="mode new") if mode == "new" else contextlib.nullcontext()
        with expected:
            found_in(torch.zeros(BLOCKS, 1, 1, 32, dtype=torch.int8), spec)


def test_bytes_that_are_no_words_are_refused() -> None:
    cache = torch.zeros(BLOCKS, 1, BLOCK, 7, dtype=torch.uint8)
    with pytest.raises(ValueError, match=re.escape("of model.layers.0.attn has pieces of 7 bytes")):
        found_in(cache, group("CrossAttentionSpec", NAMES[0], block_size=BLOCK))


def test_a_layer_has_one_number() -> None:
    assert layer_place("model.layers.31.self_attn.attn") == (False, 31)
    assert layer_place("mtp.layers.0.self_attn.attn") == (True, 0), "after all others"
    assert layer_place("model.mtp.layers.0.self_attn.attn") == (True, 0), "of MiMo-V2"
    with pytest.raises(ValueError, match="should have one"):
        layer_place("model.blocks.3.mtp.0.attn")


@pytest.mark.parametrize(("ranks", "own", "all_heads"), [(1, 2, 2), (2, 1, 2), (2, 3, 6)])
def test_layers_may_have_another_number_of_heads(ranks: int, own: int, all_heads: int) -> None:
    """As those of a draft model, or layers with windows beside others. `own`: of a rank."""
    heads, names = 4 // ranks, ("model.layers.0.attn", "draft_model.layers.0.attn")
    groups = [
        attention(name, block=BLOCK, heads=count, dim=DIM)
        for name, count in zip(names, (heads, own), strict=True)
    ]
    caches = {
        name: torch.zeros(BLOCKS, count, BLOCK, 2 * DIM)
        for name, count in zip(names, (heads, own), strict=True)
    }
    kv = caches_of(caches, groups, BLOCKS, Heads(4, rank=ranks - 1, ranks=ranks)).kv
    assert [array.heads for array in kv.layout.arrays] == [4, all_heads]
    for (start, stop), [[rows]] in zip(kv.heads, kv.planes, strict=True):
        assert {plane.shape[2] for plane in rows} == {stop - start}
