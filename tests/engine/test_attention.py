"""Paged attention against plain attention over each request's own tokens."""

import random

import pytest
import torch

from baton.engine import EngineRequest
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.step_builder import Schedule, build_step
from baton.engine.execution.inputs import attention_metadata, read_by_device
from baton.engine.kernels import Kernels
from baton.engine.model_config import Span
from baton.engine.step import Step
from tests.engine.attention_step import Step as AttentionStep

HEADS, KV_HEADS, DIM = 6, 2, 8
VOCABULARY = 1000


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("span", "with_sinks"),
    [
        (None, False),
        (None, True),
        (Span(1), False),
        (Span(16), True),
        (Span(50), False),
        (Span(8, chunked=True), False),
        (Span(24, chunked=True), True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equals_plain_attention_and_never_reads_foreign_slots(
    seed: int, block_size: int, span: Span | None, with_sinks: bool
) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    # (start, stop): decodes short and long, of one token and of several.
    decodes = [(6, 7), (7, 8), (40, 41), (90, 91), (3, 5), (37, 42), (70, 78), (60, 69)]
    # Whole prefills, later chunks of prefills, and a single token.
    spans = [*decodes, (0, 1), (0, 2), (0, 33), (5, 9), (16, 48), (31, 90), (20, 21), (10, 310)]
    rng.shuffle(spans)
    num_blocks = sum(-(-stop // block_size) for _, stop in spans) + 5
    free = list(range(num_blocks))
    rng.shuffle(free)
    # What a request must not see is NaN: other requests' blocks, blocks before its span, and positions after
    # its own.
    cache = torch.full((2, num_blocks, block_size, KV_HEADS, DIM), torch.nan)
    schedule, sequences = Schedule(), []
    for start, stop in spans:
        live = LiveRequest(EngineRequest(b"", list(range(stop))), 0)
        live.blocks.extend(free.pop() for _ in range(-(-stop // block_size)))
        keys_values = torch.randn(2, stop, KV_HEADS, DIM, generator=generator)
        for position in range(start):
            block, offset = live.blocks[position // block_size], position % block_size
            if position >= first_key(start, span) // block_size * block_size:
                cache[:, block, offset] = keys_values[:, position]
        schedule.chunks[live] = range(start, stop)
        if (start, stop) not in decodes:
            schedule.prompts[live] = range(start, stop)
        sequences.append((keys_values, torch.randn(stop - start, HEADS, DIM, generator=generator)))

    step = build_step(schedule, VOCABULARY, block_size=block_size, table_width=None)
    rows_of_chunks = rows_of(step, schedule)
    order = sorted(range(len(spans)), key=lambda i: rows_of_chunks[i].start)
    q = torch.cat([sequences[i][1] for i in order])
    k, v = torch.cat([sequences[i][0][:, spans[i][0] :] for i in order], dim=1)
    assert step.num_decodes == 7, "nine tokens attend together"
    tensors = {name: torch.from_numpy(array) for name, array in read_by_device(step).items()}
    metadata = attention_metadata(
        tensors, block_size=block_size, num_decodes=step.decode_rows, prefills=step.prefills
    )
    kernels, no_turn = Kernels(), torch.stack((torch.ones(len(q), DIM), torch.zeros(len(q), DIM)), dim=1)
    qkv = torch.cat((q, k, v), dim=1)
    q = kernels.rope_and_write(qkv, no_turn, None, cache, metadata.slots)
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None
    tiling = kernels.tile(metadata, HEADS, KV_HEADS, torch.float32, span)
    scale = 0.3 if with_sinks else DIM**-0.5
    out = kernels.attention(q, cache, tiling, sinks, scale)

    for i, rows in enumerate(rows_of_chunks):
        keys_values, queries = sequences[i]
        expected = plain(queries, keys_values, spans[i][0], span, sinks, scale)
        torch.testing.assert_close(out[rows], expected)
        assert step.positions[rows].tolist() == list(range(*spans[i]))
    written = torch.isfinite(cache).all(dim=(0, 3, 4)).sum()
    hidden = sum(first_key(start, span) // block_size * block_size for start, _ in spans)
    assert int(written) == sum(stop for _, stop in spans) - hidden, "each position is in exactly one slot"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("span", [None, Span(24), Span(5)], ids=repr)
def test_tokens_of_an_image_see_all_of_it(span: Span | None, exact: bool) -> None:
    """Beside a decode and a chunk without images; an image begins before its chunk, and one ends with it."""
    images = {0: [(10, 40), (41, 50), (70, 90)]}
    step = AttentionStep(
        [(33, 34), (20, 90), (3, 20)], (HEADS, KV_HEADS), 8, 4, span=span, images=images, decodes=[(33, 34)]
    )
    out, kv, q = step.run(Kernels(exact=exact), "cpu")
    table = step.metadata.block_tables[1].long()
    slots = table[torch.arange(90) // 4] * 4 + torch.arange(90) % 4
    keys_values = kv.flatten(1, 2)[:, slots]
    keys, values = keys_values.repeat_interleave(HEADS // KV_HEADS, dim=2)
    for row, query in enumerate(range(20, 90), start=1):
        seen = max([query + 1, *(stop for start, stop in images[0] if start <= query < stop)])
        first = first_key(query, span)
        scores = torch.einsum("hd,khd->hk", q[row], keys[first:seen]) * step.scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values[first:seen])
        torch.testing.assert_close(out[row], expected)
    causal = AttentionStep(
        [(33, 34), (20, 90), (3, 20)], (HEADS, KV_HEADS), 8, 4, span=span, decodes=[(33, 34)]
    )
    others = [0, *range(71, 88)]
    assert torch.equal(out[others], causal.run(Kernels(exact=exact), "cpu")[0][others])


def first_key(query: int, span: Span | None) -> int:
    if span is None:
        return 0
    return query // span.length * span.length if span.chunked else max(0, query - span.length + 1)


def rows_of(step: Step, schedule: Schedule) -> list[slice]:
    """The rows of each chunk, by its last token's row."""
    ends = {live: int(row) + 1 for live, row in zip(schedule.sampled, step.sampled_rows, strict=True)}
    return [slice(ends[live] - len(positions), ends[live]) for live, positions in schedule.chunks.items()]


def plain(
    q: torch.Tensor,
    keys_values: torch.Tensor,
    start: int,
    span: Span | None,
    sinks: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    k, v = keys_values.repeat_interleave(HEADS // KV_HEADS, dim=2)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    visible = torch.zeros(len(q), len(k), dtype=torch.bool)
    for i, query in enumerate(range(start, start + len(q))):
        visible[i, first_key(query, span) : query + 1] = True
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    with_sink = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", with_sink.softmax(-1)[..., :-1], v)


def test_only_tokens_that_complete_their_request_are_sampled() -> None:
    def live(tokens: int) -> LiveRequest:
        result = LiveRequest(EngineRequest(b"", list(range(tokens))), 0)
        result.blocks.extend([0, 1, 2])
        return result

    prompts = {live(9): range(4), live(9): range(4, 9)}
    decoding = live(3)
    schedule = Schedule({**prompts, decoding: range(2, 3)}, prompts)
    step = build_step(schedule, VOCABULARY, block_size=4, table_width=None)
    assert schedule.sampled == [decoding, [*prompts][1]]
    assert step.token_ids[step.sampled_rows].tolist() == [2, 8]
