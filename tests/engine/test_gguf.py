"""GGUF files: they give the same model, and broken files are refused by name."""

import struct
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from baton.engine import EngineConfig
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.loader import check_model
from baton.engine.loader.gguf_checkpoint import GGUFCheckpoint
from baton.engine.loader.gguf_file import PIECE_BYTES, GGUFFile
from baton.engine.loader.hf import DummyCheckpoint, HFCheckpoint
from tests.engine.checkpoints import assert_refused, is_refused, load
from tests.engine.conftest import request_of, save_tiny, tokens_of
from tests.engine.test_models import LLAMA3_ROPE


def write_gguf(
    path: Path, reference: Any, architecture: str, *, rope_freqs: torch.Tensor | None = None, parts: int = 1
) -> None:
    """Writes a GGUF file like llama.cpp's converter. `parts`: in as many files."""
    config = reference.config
    size = -(-len(reference.state_dict()) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        writer.add_float32(
            "gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"]
        )
        if (factor := rope.get("factor")) is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_token_list([b"a", b"longer token", b""])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id((1 << 32) - 1)  # which the embedding lacks
    writer.add_eot_token_id(5)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in by_layer(reference.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        permuted = next((n for key, n in heads.items() if key in name and architecture == "llama"), None)
        if permuted:
            tensor = tensor.unflatten(0, (permuted, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if name.endswith("norm.weight") and architecture == "gemma3":
            tensor = tensor + 1
        data = tensor.numpy()
        if name.endswith("up_proj.weight"):
            data = data.astype("float16")
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), data)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    write(writer)


def by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the gate and up of experts apart, as llama.cpp has them."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            made |= {name.replace("gate_up_proj", "gate_proj.weight"): gate.contiguous()}
            made |= {name.replace("gate_up_proj", "up_proj.weight"): up.contiguous()}
        elif name.endswith("experts.down_proj"):
            made[f"{name}.weight"] = tensor
        else:
            made[name] = tensor
    return made


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


types = gguf.GGMLQuantizationType
NO_REFERENCE = {
    *(types.Q8_1, types.Q8_K),  # of activations only
    *(types.I8, types.I16, types.I32, types.I64, types.F64, types.Q1_0),  # the package does not dequantize
}

KINDS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3moe": ("Qwen3Moe", {"norm_topk_prob": True}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 16, "head_dim": 16}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "glm4": ("Glm4", {}),
}
"""Each architecture of GGUF: the kind of model in transformers, and its settings."""


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3", "phi3", *sorted({*KINDS} - {"llama", "gemma3", "phi3"})]
)
def test_a_gguf_file_gives_the_same_model(architecture: str, tmp_path: Path) -> None:
    kind, changes = KINDS[architecture]
    reference = save_tiny(tmp_path, kind, **changes)
    freqs = None
    if architecture == "llama":
        rotary = reference.model.rotary_emb
        freqs = 500.0 ** (-torch.arange(0, 16, 2) / 16) / rotary.inv_freq
    write_gguf(tmp_path / "model.gguf", reference, architecture, rope_freqs=freqs)
    hf, from_gguf = load(tmp_path), load(tmp_path / "model.gguf")
    assert from_gguf.model_config.eos_ids == (2, 5)
    check_model(EngineConfig(model=str(tmp_path / "model.gguf")))
    requests = [request_of(i, range(3, 40 + i), max_tokens=20, ignore_eos=True) for i in range(2)]
    assert tokens_of(hf, requests) == tokens_of(from_gguf, requests)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("gguf")
    write_gguf(directory / "model.gguf", save_tiny(directory, "Llama"), "llama")
    return (directory / "model.gguf").read_bytes()


def test_a_part_of_a_tensor_is_a_slice_of_the_whole(
    tiny_path: Path, tiny_gguf: bytes, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(tiny_gguf)
    config = HFCheckpoint(tiny_path).config
    dummy = DummyCheckpoint(config, "dummy", 0, torch.device("cpu"))
    for checkpoint in (HFCheckpoint(tiny_path), GGUFCheckpoint(tmp_path / "model.gguf"), dummy):
        for name, shape in (
            ("model.layers.1.self_attn.q_proj.weight", (64, 64)),  # a GGUF file has it in another order
            ("model.layers.1.mlp.up_proj.weight", (96, 64)),
            ("model.layers.1.mlp.down_proj.weight", (64, 96)),
            ("model.norm.weight", (64,)),
        ):
            parts = [Shard(5 + 3 * i, 40 - 3 * i, size) for i, size in enumerate(shape)]
            everything = checkpoint.read(name, [unsharded(size) for size in shape])
            assert checkpoint.read(name, parts).equal(everything[tuple(part.indices for part in parts)])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])  # the gguf package quantizes to these
def test_a_part_of_a_quantized_tensor_needs_only_its_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    data = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    writer.add_tensor("m", gguf.quants.quantize(data, quantized), raw_dtype=quantized)
    write(writer)
    file = GGUFFile(tmp_path / "model.gguf")
    everything = file.read("m", [unsharded(8), unsharded(256)])
    assert np.abs(everything - data).max() < 0.5
    sizes: list[int] = []

    def counted(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        sizes.append(raw.size)
        return dequantize(raw, kind)

    monkeypatch.setattr("baton.engine.loader.gguf_file.dequantize", counted)
    part = file.read("m", [Shard(2, 5, 8), Shard(70, 130, 256)])
    np.testing.assert_array_equal(part, everything[2:5, 70:130])
    block = gguf.GGML_QUANT_SIZES[quantized][1]
    assert sizes == [3 * 3 * block], "three rows of the blocks that hold columns 64 to 159"


def test_broken_gguf(tiny_gguf: bytes, tmp_path: Path) -> None:
    whole = tiny_gguf
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header = GGUFFile(path)._data_start
    position = whole.index(b"general.architecture") + len("general.architecture") + 4
    incomplete = r"model\.gguf: cut short, tensor \S+ is incomplete"
    corrupt = r"corrupt or cut short at byte \d+; download it again$"
    for data, message in (
        (whole[:-1000], incomplete),
        *((whole[:cut], rf"model\.gguf: {corrupt}") for cut in (3, 10, 30, header // 2, header - 64)),
        (b"", r"model\.gguf: empty"),
        (b"PK\3\4" + whole[4:100], "not a GGUF file"),
        (whole[:position] + struct.pack("<Q", 1 << 60) + whole[position + 8 :], corrupt),
        (whole.replace(b"token_embd.weight", b"token_embx.weight", 1), r"token_embd\.weight is missing"),
        (
            whole.replace(b"blk.1.attn_q.", b"blk.1.attn_x.", 1),
            r"1\.self_attn\.q_proj\.weight is missing",
        ),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load(path)
        if message == incomplete:
            assert_refused(path, message)


def test_a_gguf_tensor_of_an_unsupported_type_is_named(tiny_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    name = b"blk.1.ffn_up.weight"  # [96, 64], F16
    at = tiny_gguf.index(name) + len(name) + 4  # behind the number of dimensions, which is 2
    shape, kind, offset = slice(at, at + 16), slice(at + 16, at + 20), slice(at + 20, at + 28)

    def refused(where: slice, new: bytes, message: str) -> None:
        path.write_bytes(tiny_gguf[: where.start] + new + tiny_gguf[where.stop :])
        with pytest.raises(ValueError, match=rf"model\.gguf: .*tensor \S+ {message}"):
            load(path)

    refused(kind, struct.pack("<I", 99), "is of type 99, which is not supported")
    refused(kind, struct.pack("<I", types.I8), "is of type I8, which is not supported")
    refused(slice(at, at + 20), struct.pack("<QQI", 63, 96, types.Q4_1), r"of type Q4_1 is \[96, 63\]")
    refused(shape, struct.pack("<QQ", 64, 0), r"of type F16 is \[0, 64\]")
    refused(shape, struct.pack("<QQ", 64, 1 << 62), "is incomplete")
    refused(shape, struct.pack("<QQ", 64, 95), r"is \[95, 64\], by the model's .* should be \[96, 64\]")
    refused(offset, struct.pack("<Q", 7), "is at 7, which is not aligned")
    refused(offset, struct.pack("<Q", 1 << 63), "is incomplete")


@pytest.mark.all
def test_a_damaged_gguf_header_is_accepted_or_refused_by_name(tiny_gguf: bytes, tmp_path: Path) -> None:
    """Every fourth byte of it, in two ways: never another exception, never memory for what is not there."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf)
    header = GGUFFile(path)._data_start
    refused = 0
    for at in range(0, header, 4):
        for damage in (0xFF, tiny_gguf[at] ^ 0x10):
            path.write_bytes(tiny_gguf[:at] + bytes([damage]) + tiny_gguf[at + 1 :])
            refused += is_refused(partial(GGUFCheckpoint, path), str(path))
    assert refused > header // 4


def test_a_model_in_several_parts(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Qwen3", head_dim=16)
    write_gguf(tmp_path / "model.gguf", reference, "qwen3", parts=3)
    first, second, _ = sorted(tmp_path.glob("model-*.gguf"))
    requests = [request_of(0, range(3, 40), max_tokens=20, ignore_eos=True)]
    assert tokens_of(load(tmp_path), requests) == tokens_of(load(first), requests)
    check_model(EngineConfig(model=str(first)))
    with pytest.raises(ValueError, match=r"part 2 of 3; name the first part .*NAME-00001-of-00003\.gguf"):
        load(second)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.gguf cannot be read"):
        load(first)
    first.rename(tmp_path / "alone.gguf")
    with pytest.raises(ValueError, match=r"alone\.gguf: part 1 of 3; name the first part"):
        load(tmp_path / "alone.gguf")


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if kind not in NO_REFERENCE])
def test_each_type_is_dequantized_as_by_the_gguf_package(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """Random bytes; some of the numbers are not finite. Rows of two blocks, in more than one piece."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rows = 2 * PIECE_BYTES // (2 * size) + 3
    raw = np.random.default_rng(int(kind)).integers(0, 256, (rows, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("m", raw, raw_dtype=kind)
    write(writer)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, kind)
        read = GGUFFile(tmp_path / "model.gguf").read("m", [unsharded(rows), unsharded(2 * values)])
    np.testing.assert_array_equal(read, expected)
