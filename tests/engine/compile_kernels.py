"""Compiles every kernel for an H200 on a machine without one: `python -m tests.engine.compile_kernels`.

The engine launches its kernels with the real arguments, but without a driver. A kernel that does not compile,
or does not fit into shared memory, fails here and not first on a GPU.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

H200 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10  # the most that one program can use


class NoDriver:
    def get_current_target(self) -> GPUTarget:
        return H200

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead(self: Any, grid: Any) -> Any:
    def launch(*args: Any, **kwargs: Any) -> None:
        kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
        shared = kernel.metadata.shared
        print(f"{self.fn.__name__}: {shared} bytes of shared memory")
        assert shared <= SHARED_BYTES, f"{self.fn.__name__} takes {shared} bytes of shared memory"
        if self.fn.__name__ == "_decode":  # chunks by `wgmma` add in this order alone
            assert "kWidth = 4" not in kernel.asm["ttgir"], "an exact decode adds in another order"

    return launch


def main() -> None:
    triton.runtime.driver.set_active(NoDriver())
    JITFunction.__getitem__ = compile_instead

    from baton.engine.kernels import (
        FP8,
        KV,
        AttentionMetadata,
        Both,
        Choice,
        Experts,
        Fp8Experts,
        Fp8KV,
        GatedDelta,
        HeadNorm,
        Index,
        IndexLayer,
        KimiDelta,
        LatentHeads,
        LatentNorm,
        LayerState,
        Mamba2,
        ShortConvolution,
        parts,
    )
    from baton.engine.kernels.attention import gather_kv
    from baton.engine.kernels.exact_linear import ExactLinear
    from baton.engine.kernels.peer_copy import PeerCopy
    from baton.engine.kernels.quantized.fp8_linear import Fp8Linear
    from baton.engine.kernels.quantized.int4_linear import FORMS, Int4Linear
    from baton.engine.kernels.quantized.int8_linear import Int8Linear
    from baton.engine.kernels.quantized.reference import four_bits, of_experts
    from baton.engine.kernels.sampling import draft_kernels, drafts, race
    from baton.engine.kernels.sampling.thresholds import thresholds
    from baton.engine.kernels.skinny_linear import SkinnyLinear
    from baton.engine.kernels.sum_norm import SumNorm
    from baton.engine.kernels.triton_kernels import TritonKernels
    from baton.engine.model_config import ClampedSwiGLU, GeLU, IndexConfig, LatentConfig, Scoring, Span
    from baton.engine.models.cache_spec import of_slots
    from baton.kv_names.cache_kinds import HEAD_STATE, CacheArray
    from baton.kv_transfer.device import copy_kernels
    from baton.kv_transfer.device.copy_kernels import Pages

    def of(block_size: int, blocks: int, prefills: list[tuple[int, int]]) -> AttentionMetadata:
        """Of a step with 64 decodes. `blocks`: of each request."""
        rows, requests = 64 + sum(stop - start for start, stop in prefills), 64 + len(prefills)
        slots, tables = torch.zeros(rows, dtype=torch.int64), torch.zeros(requests, blocks, dtype=torch.int32)
        return AttentionMetadata(block_size, slots, tables, tables[:, 0] + 1, 64, prefills)

    def step(
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        norm: bool,
        span: Span | None = None,
        fp8_kv: bool = False,
        softcap: float | None = None,
    ) -> None:
        print(f"-- {dtype}, {heads} heads on {kv_heads}, {head_dim} each, block {block_size}")
        kernels = TritonKernels(torch.device("cpu"), head_dim)
        rows, hidden = 80, heads * head_dim
        x = torch.zeros(rows, hidden, dtype=dtype)
        plain = torch.zeros(2, 4, block_size, kv_heads, head_dim, dtype=dtype)
        kv: KV = Fp8KV(plain.to(FP8), torch.zeros(2, 4, kv_heads, block_size)) if fp8_kv else plain
        index, features = torch.zeros(rows, dtype=torch.int32), torch.zeros(4, 4, x.shape[1], dtype=dtype)
        for part, added in ((0, False), (1, True)):
            kernels.place_images(x, index, features, part, added=added)
        places, axes = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(128, dtype=torch.int64)
        kernels.turn_images(torch.zeros(rows, 2, 128), index, places, torch.zeros(64, 2, 128), axes)
        kernels.add_rms_norm(x, None, x[0], 1e-5)
        kernels.add_rms_norm(x, x, x[0], 1e-5)
        kernels.activate(torch.zeros(rows, 2 * 14336, dtype=dtype))
        kernels.activate(torch.zeros(rows, 2 * 14336, dtype=dtype), activation=GeLU())
        metadata = of(block_size, 16, [(0, rows - 64)])
        head_norm = HeadNorm(torch.zeros(heads + kv_heads, head_dim, dtype=dtype), 1e-6) if norm else None
        qkv = torch.zeros(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
        rotary = torch.zeros(rows, 2, head_dim)
        q = kernels.rope_and_write(qkv, rotary, head_norm, kv, metadata.slots)
        if norm:
            kernels.rotate(q.contiguous(), rotary, head_norm)
        sinks = None if span is None else x[0, :heads]
        long = replace(metadata, num_decodes=0, prefills=[(5000, 5000 + rows)])
        scale = head_dim**-0.5
        kernels.attention(q, kv, kernels.tile(long, heads, kv_heads, dtype, span), sinks, scale, softcap)
        for places in (None, torch.zeros(65, dtype=torch.int32)):
            tiling = kernels.tile(replace(metadata, places=places), heads, kv_heads, dtype, span)
            kernels.attention(q, kv, tiling, sinks, scale, softcap)
        if dtype is not torch.float32:
            exact = TritonKernels(torch.device("cpu"), head_dim, exact=True)
            exact.attention(q, kv, exact.tile(metadata, heads, kv_heads, dtype, span), sinks, scale)
            exact.attention(q, kv, exact.tile(long, heads, kv_heads, dtype, span), sinks, scale)
            for tokens, size in itertools.product((1, 64, 128, 256, 1024), (hidden, 16 * hidden)):
                weight, many = (
                    torch.zeros(size, hidden, dtype=dtype),
                    torch.zeros(tokens, hidden, dtype=dtype),
                )
                ExactLinear(weight, weight[:, 0].contiguous(), 132)(many)
                scales = torch.zeros(1, size)
                exact.fp8_linear(weight.to(FP8), scales, None, dtype)(kernels.quantize(many, grouped=False))
        if isinstance(kv, Fp8KV):
            gather_kv.gather(kv, metadata.block_tables[0], dtype)
        if dtype is not torch.float32:
            for tokens in (1, 20, 64):
                for size in (64, hidden, 16 * hidden):
                    SkinnyLinear(torch.zeros(size, hidden, dtype=dtype), None, 132)(x[:tokens])
            for grouped in (False, True):
                for both in (False, True):
                    kernels.add_rms_norm(x, x, x[0], 1e-5, grouped, both=both)
                kernels.activate(torch.zeros(rows, 2 * 14336, dtype=dtype), grouped)
                for size, blocks in itertools.product((4 * hidden, 1024), (False, True)[: 1 + grouped]):
                    scales = torch.zeros(-(-hidden // 128) if grouped else 1, size // 128 if blocks else size)
                    linear = Fp8Linear(torch.zeros(size, hidden, dtype=FP8), scales, None, dtype, 132)
                    for tokens in (1, 20, 64, *([rows] if grouped else [])):
                        linear.triton(kernels.quantize(x[:tokens], grouped=grouped))
        table = torch.zeros(2, copy_kernels.FIELDS, dtype=torch.int64)
        values, scales = parts(kv)
        pools = [values, *([] if scales is None else [scales.transpose(2, 3).unsqueeze(4)])]
        for into_pool in (False, True):
            for pool in pools:
                copy_kernels.launch(table, Pages.of(pool), (3, kv_heads), into_pool=into_pool)
        copy_kernels.launch_sums(torch.zeros(2, copy_kernels.SUM_FIELDS, dtype=torch.int64), 9)
        table = torch.zeros(2, copy_kernels.CONVERTED_FIELDS, dtype=torch.int64)
        if not fp8_kv:
            for into_pool in (False, True):
                copy_kernels.launch_converting(table, values, FP8, 3 * kv_heads, into_pool=into_pool)

    step(torch.bfloat16, 32, 8, 128, 128, norm=False)  # Llama 3.1 8B
    step(torch.bfloat16, 32, 8, 128, 16, norm=True)  # Qwen3 8B
    step(torch.float16, 28, 4, 128, 64, norm=False)  # Qwen2.5 7B
    step(torch.float16, 28, 4, 128, 192, norm=False)  # a tile of keys may be in two blocks
    step(torch.float32, 32, 8, 128, 128, norm=False)  # the most shared memory
    step(torch.bfloat16, 9, 3, 64, 128, norm=False)  # SmolLM2 135M
    step(torch.bfloat16, 8, 4, 256, 128, norm=True)  # the largest head
    step(torch.bfloat16, 8, 1, 512, 128, norm=True)  # Gemma 4 E2B, layers without a window
    step(torch.bfloat16, 64, 8, 64, 128, norm=False, span=Span(128))  # gpt-oss
    step(torch.bfloat16, 40, 8, 128, 128, norm=False, span=Span(8192, chunked=True))  # Llama 4
    step(torch.bfloat16, 8, 4, 256, 128, norm=False, softcap=50.0)  # Gemma 2, layers without a window
    step(torch.bfloat16, 8, 4, 256, 128, norm=False, softcap=50.0, span=Span(4096))

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        step(dtype, 32, 8, 128, 128, norm=False, fp8_kv=True)
    step(torch.bfloat16, 32, 8, 128, 16, norm=True, fp8_kv=True)
    step(torch.bfloat16, 8, 4, 256, 128, norm=True, fp8_kv=True)
    step(torch.bfloat16, 64, 8, 64, 128, norm=False, span=Span(128), softcap=50.0, fp8_kv=True)

    print("-- INT4 weights")
    codes = torch.zeros(4096, 4096, dtype=torch.uint8)
    for size in (16, 32, 64, 128):
        dtype = torch.float16 if size == 64 else torch.bfloat16
        scales = torch.zeros(4096, 4096 // size)
        for zeros in (scales,) if size == 16 else (scales, scales + 1):
            int4 = Int4Linear(four_bits(codes, scales, zeros, dtype, floats=size == 16), None, 132)
            for tokens in (1, 2, 4, 16):
                int4(torch.zeros(tokens, 4096, dtype=dtype))
            exact_int4 = Int4Linear(int4.weight, None, 132, exact=True)
            for tokens in (1, 17, 64, 128, 256, 1024):
                exact_int4(torch.zeros(tokens, 4096, dtype=dtype))
            for tokens, form in itertools.product((64, 128, 256), FORMS):
                x = TritonKernels(torch.device("cpu"), 128).quantize(
                    torch.zeros(tokens, 4096, dtype=dtype), grouped=False
                )
                int4.triton(x, form)

    print("-- INT8 weights")
    for size, dtype in ((32, torch.bfloat16), (128, torch.float16), (4096, torch.bfloat16)):
        scales = torch.zeros(4096, 4096 // size)
        for zeros in (scales, scales + 1):
            int8 = Int8Linear(codes, scales, zeros, None, dtype, 132)
            for tokens in (1, 32, 64, 256):
                int8.triton(torch.zeros(tokens, 4096, dtype=dtype))
            int8.values()

    print("-- sums over ranks")
    for ranks, rank in ((2, 0), (2, 1), (4, 3)):
        memory = [4096 * (i + 1) for i in range(ranks)]
        x = torch.zeros(3, 8192, dtype=torch.bfloat16)
        SumNorm(rank, memory, 64 << 20, torch.device("cpu"))(x, x, x[0], 1e-5)
        copies = PeerCopy(rank, memory, 64 << 20, torch.device("cpu"))
        copies.gather(x, ranks * x.shape[1])
        copies.broadcast(torch.zeros(256, dtype=torch.int64))

    print("-- experts")
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (8, 40, 1024):
            kernels = TritonKernels(torch.device("cpu"), 128)
            x, logits = torch.zeros(tokens, 2048, dtype=dtype), torch.zeros(tokens, 16, dtype=dtype)
            gate_up = torch.zeros(16, 2 * 768, 2048, dtype=dtype)
            down = torch.zeros(16, 2048, 768, dtype=dtype)
            for choice in (Choice(8, Scoring.NORMALIZED_SOFTMAX), Choice(1, Scoring.SIGMOID_ON_INPUT)):
                counts, experts = torch.zeros(16, dtype=torch.int32), Experts(gate_up, down, choice)
                kernels.mix_experts(x, logits, experts, counts)
                kernels.mix_experts(x, logits, experts, counts, shared=x.clone)
                terms = kernels.mix_experts(x, logits, experts, counts, shared=x.clone, summed=False)
                kernels.add_rms_norm(x, terms, x[0], 1e-5)
                for groups, rows in ((1, 1), (16, 1), (16, 128)):
                    of_gate_up = Fp8Experts(gate_up.to(FP8), torch.zeros(16, groups, 2 * 768 // rows))
                    of_down = Fp8Experts(down.to(FP8), torch.zeros(16, min(groups, 6), 2048 // rows))
                    both = Both(x, kernels.quantize(x, grouped=groups > 1))
                    kernels.mix_experts(both, logits, Experts(of_gate_up, of_down, choice), counts)
                if dtype is torch.bfloat16:
                    of_gate_up, of_down = (
                        of_experts(
                            [four_bits(codes, codes[:, ::group], codes[:, ::group], dtype, floats=floats)]
                            * 16
                        )
                        for codes, group, floats in (
                            (gate_up[0].byte(), 32, False),
                            (down[0].byte(), 16 if tokens == 40 else 32, True),
                        )
                    )
                    kernels.mix_experts(x, logits, Experts(of_gate_up, of_down, choice), counts)
            experts = Experts(
                gate_up,
                down,
                Choice(4, Scoring.NORMALIZED_SOFTMAX),
                gate_up_bias=gate_up[:, :, 0].contiguous(),
                down_bias=down[:, :, 0].contiguous(),
                activation=ClampedSwiGLU(1.702, 7.0),
            )
            kernels.mix_experts(x, logits, experts, counts)

    print("-- latent attention")
    # V2-Lite, GLM-4.7-Flash, V3. Small blocks have another kernel.
    sizes = (16, 128, 128, 64), (20, 192, 256, 64), (128, 128, 128, 64), (20, 192, 256, 16)
    for heads, nope, value, block_size in sizes:
        for dtype in (torch.bfloat16, torch.float32)[: 1 + (block_size == 64)]:
            shape = LatentConfig(1536, 512, nope, 64, value, 1.0)
            kernels, rows = TritonKernels(torch.device("cpu"), 256), 64 + 500
            metadata = of(block_size, 32, [(0, 20), (0, 480)])
            q = torch.zeros(rows, heads, nope + 64, dtype=dtype)
            made, norm = q.new_zeros(rows, 576), LatentNorm(q.new_zeros(512), 1e-6)
            kv, up = q.new_zeros(1, 8, block_size, 1, 576), q.new_zeros(heads, nope + value, 512)
            rotary = torch.zeros(rows, 2, 64)
            kernels.write_latent(q, made[:, :512], made[:, 512:], norm, rotary, kv, metadata.slots)
            exact = TritonKernels(torch.device("cpu"), 256, exact=True)
            for tiling in (
                planning.tile_latent(metadata, heads, shape, dtype) for planning in (kernels, exact)
            ):
                kernels.latent_attention(q, kv, tiling, LatentHeads.of(up, shape))

    print("-- sparse attention")
    # GLM-5, and DeepSeek-V3.2 with contexts whose choice takes one program and several.
    for heads, blocks, interleaved in ((64, 128, True), (128, 128, False), (128, 2560, False)):
        for dtype in (torch.bfloat16, torch.float32)[: 1 + (heads == 64)]:
            index = IndexConfig(heads // 2, 128, 2048, interleaved)
            shape = LatentConfig(1536, 512, 128, 64, 128, 1.0, index)
            rows = 64 + 16
            metadata = of(64, blocks, [(2100, 2116)])
            ones, plain = torch.ones(128, dtype=dtype), torch.zeros(1, 8, 64, 1, 128)
            keys: KV = plain if dtype is torch.float32 else Fp8KV(plain.to(FP8), torch.zeros(1, 8, 1, 64))
            layer = IndexLayer(ones, ones, interleaved, None if keys is plain else ones.diag())
            of_index = torch.zeros(rows, heads // 2, 128, dtype=dtype)
            made = Index(of_index, of_index[:, 0], of_index[:, :, 0].contiguous(), layer)
            q = torch.zeros(rows, heads, 192, dtype=dtype)
            kv, up = q.new_zeros(1, 8, 64, 1, 576), q.new_zeros(heads, 256, 512)
            for exact in (False, True):
                kernels = TritonKernels(torch.device("cpu"), 256, exact=exact)
                queries = kernels.write_index(made, torch.zeros(rows, 2, 64), keys, metadata.slots)
                tiling = kernels.tile_latent(metadata, heads, shape, dtype)
                kernels.choose_positions(queries, keys, tiling)
                kernels.latent_attention(q, kv, tiling, LatentHeads.of(up, shape))

    print("-- states")
    ones = torch.ones(3, dtype=torch.int32)
    copies = torch.zeros(80, dtype=torch.int32)
    metadata = AttentionMetadata(16, ones, ones, ones, 2, [(0, 78)], state_slots=ones, state_copies=copies)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, groups, width, size in (
            (128, 1, 64, 128),
            (48, 1, 64, 128),
            (112, 8, 64, 256),
            (64, 1, 80, 96),
        ):
            channels = heads * width + 2 * groups * size
            kernels = TritonKernels(torch.device("cpu"), 128)
            per_head = torch.zeros(heads)
            weight = torch.zeros(4, channels, dtype=dtype)
            layer = Mamba2(weight, weight[0], per_head, per_head, groups, per_head, (0.0, float("inf")))
            state = LayerState(torch.zeros(4, 3, channels, dtype=dtype), torch.zeros(4, heads, width, size))
            projected = torch.zeros(80, heads * width + channels + heads, dtype=dtype)
            gate, inputs = projected.split((heads * width, channels + heads), dim=1)
            x, dt = inputs.split((channels, heads), dim=1)
            y = kernels.mix_states(x, [dt], layer, state, kernels.tile_states(metadata, dtype))
            kernels.gated_rms_norm(y, gate, y[0], 1e-5, groups)
            kernels.gated_rms_norm(y, gate, y[0], 1e-5, 1, kernels.gated_squares(y, gate))
            tiling = kernels.tile_states(metadata, dtype)
            delta = GatedDelta(weight, None, per_head, per_head, groups)
            kernels.norm_gate(kernels.mix_states(x, [dt, dt], delta, state, tiling), gate, y[0, :width], 1e-5)
            exact = TritonKernels(torch.device("cpu"), 128, exact=True)
            for rates, parameters in (([dt], layer), ([dt, dt], delta)):
                exact.mix_states(x, rates, parameters, state, exact.tile_states(metadata, dtype))
        heads, width, size = 32, 128, 128  # of Kimi-Linear
        weight, per_head = torch.zeros(4, 3 * heads * width, dtype=dtype), torch.zeros(heads)
        kimi = KimiDelta(weight, None, torch.zeros(heads * size), per_head, heads)
        state = LayerState(torch.zeros(4, *weight[1:].shape, dtype=dtype), torch.zeros(4, heads, width, size))
        x, dt = torch.zeros(80, 3 * heads * width, dtype=dtype), torch.zeros(80, heads * size, dtype=dtype)
        for exact in (True, False):
            kernels = TritonKernels(torch.device("cpu"), 128, exact=exact)
            tiling = kernels.tile_states(metadata, dtype)
            y = kernels.mix_states(x, [dt, dt[:, :heads]], kimi, state, tiling)
            kernels.norm_gate(y, dt, y[0, :width], 1e-5, sigmoid=True)
            short = ShortConvolution(weight[1:], None)
            kernels.mix_states(x, (), short, LayerState(state.conv[:, 1:], state.ssm), tiling)

    print("-- copies of states")
    table = torch.zeros(2, copy_kernels.FIELDS, dtype=torch.int64)
    for moved in (torch.zeros(4, 3, 8448)[..., :8192].unflatten(2, (128, 64)), torch.zeros(4, 1, 128, 8192)):
        for into_pool in (False, True):
            copy_kernels.launch(table, Pages.of(of_slots(moved)), (128, 1), into_pool=into_pool)
    table = torch.zeros(2, copy_kernels.CONVERTED_FIELDS, dtype=torch.int64)
    pieces = copy_kernels.pieces_to_convert(CacheArray(HEAD_STATE, "ssm", 1, 128, 8192, "float32"))
    narrow = torch.bfloat16, torch.float16
    for kept, sent in (*itertools.product((torch.float32,), narrow), narrow, narrow[::-1]):
        pool = of_slots(torch.zeros(4, 1, 128, 8192, dtype=kept))
        for into_pool in (False, True):
            copy_kernels.launch_converting(table, pool, sent, 128 * pieces, pieces, into_pool=into_pool)

    print("-- sampling")
    logits, limit = torch.zeros(4, 128256), torch.ones(4)
    whole = torch.zeros(4, dtype=torch.int32)
    race.draw(logits.bfloat16())
    race.draw(logits, limit, whole)
    race.draw(logits, limit, whole, logits, thresholds(logits, whole, limit, limit))
    ids = torch.zeros(16, dtype=torch.int64)
    rows, columns = ids.int(), torch.zeros((16, 4), dtype=torch.int64)
    resolved = torch.zeros((2, 17), dtype=torch.int64)
    sources = drafts.Sources(rows, rows, columns.int(), columns, rows)
    draft_kernels.follow(drafts.StepInputs(rows, ids, ids, rows), sources, columns, columns, resolved)
    draft_kernels.accepted(ids, ids, ids, resolved)


if __name__ == "__main__":
    main()
