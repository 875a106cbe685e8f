"""Workers that fit a router and each other, and workers that do not."""

import re
from typing import Any

import pytest

from baton.router.workers.checks import RefusedWorker, RouterModel, check_fit
from baton.rpc import worker_pb2 as pb

MODEL = RouterModel("ours", vocab_size=1000, vocabulary_fingerprint="v1")


def described(**changes: Any) -> pb.WorkerDescription:
    fields: dict[str, Any] = {
        "first_pool": pb.POOL_DECODE, "block_size": 16, "num_blocks": 8, "max_model_len": 64,
        "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "model": "theirs", "model_fingerprint": "model=m1; weights=w1; format=gguf", "dtype": "bfloat16",
        "layout_fingerprint": "l1", "vocab_size": 1024, "kv_address": "a:2",
        "vocabulary_fingerprint": "v1",
    }  # fmt: skip
    return pb.WorkerDescription(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocabulary_fingerprint": ""},  # a model of random weights
        {"dtype": "float8_e4m3fn"},  # is converted
        {"vocab_size": 999},  # a token was added to the tokenizer, and not to the model
    ],
)
def test_workers_that_fit(changes: dict[str, Any]) -> None:
    check_fit(described(**changes), MODEL, {"prefill 0 at a:1": described()})


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"first_pool": 7}, "is unknown", "log"),
        ({"block_size": 0}, "no block size", "log"),
        ({"max_num_seqs": 0}, "no seats", "log"),
        ({"max_num_batched_tokens": 0}, "or no tokens of a step", "log"),
        ({"kv_address": ""}, "no KV address", "log"),
        ({"content_root": bytes(65)}, "65 bytes, more than 64", "log"),
        (
            {"vocabulary_fingerprint": "v2"},
            r"its tokenizer \(theirs\) is not the router's \(ours\)",
            "--model",
        ),
        ({"vocabulary_fingerprint": "", "vocab_size": 999}, "has 999 tokens, .* 1000", "--model"),
        (
            {"model": "mine", "model_fingerprint": "model=m2; weights=w2; format=gguf"},
            r"^it differs from prefill 0 at a:1 in: model \(mine, there theirs\), weights \(mine, there thei",
            "the same --model and --revision. The one",
        ),
        (
            {"model_fingerprint": "model=m1; weights=w1; format=plain", "dtype": "float32"},
            r"in: format of its weights \(plain, there gguf\), KV dtype \(float32, there bfloat16\)$",
            "the same --dtype and --quantization. The one",
        ),
        (
            {"model_fingerprint": "model=m1; weights=w2; format=gguf; version=v2"},
            r"weights \(.*\), version of its weights \(v2, there of --model\)$",
            "Run `baton weights`",
        ),
        ({"dtype": "float32"}, r"in: KV dtype \(float32, there bfloat16\)$", "the same --dtype. The one"),
        ({"model_fingerprint": "of another form"}, "in: of another form ", "--model"),
        ({"layout_fingerprint": "l2"}, r"in: KV layout \(l2, there l1\)$", "the same --engine: .* caches of"),
        (
            {"layout_fingerprint": "kv12 layers=33 @32 attention.kv=2x2x16"},  # drafts of vLLM
            r"in: KV layout",
            "the same --speculative-config: ",
        ),
        ({"layout_fingerprint": "l1%1"}, r"in: KV layout", "the same --engine: .* windows of this model"),
        (
            {"layout_fingerprint": "l2", "model_fingerprint": "model=m2; weights=w1; format=gguf"},
            r"KV layout \(l2, there l1\)$",
            "the same --model and --revision. The one",
        ),
    ],
)
def test_workers_that_do_not_fit(changes: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(RefusedWorker, match=reason) as refusal:
        check_fit(described(**changes), MODEL, {"prefill 0 at a:1": described()})
    assert re.search(remedy, refusal.value.remedy)
