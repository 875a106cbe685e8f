"""Checks of a router's messages."""

import math
from array import array
from dataclasses import fields, replace
from typing import Any

import pytest

from baton.engine import EngineRequest, Image, Reasoning, SamplingParams
from baton.kv_names import with_adapter
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import packed_ids
from baton.vision.images import ImageSettings
from baton.worker.requests import content_source, engine_request
from baton.worker.service_process.validation import (
    Limits,
    RefusedAttempt,
    StreamError,
    add_pixels,
    attempt_id,
    encode,
    plan,
    retarget,
    source,
    submission,
)
from tests.cluster_helpers import request, sampling

LIMITS = Limits(vocab_size=100, max_model_len=32)
ID = b"a" * 16


def taken(asked: pb.Request, limits: Limits = LIMITS, pixels: bytes = b"") -> EngineRequest:
    """What the engine gets of it."""
    checked = submission(ID, asked, limits, pixels)
    assert checked.origin is not None
    return engine_request(checked.origin, asked, checked.pixels)


def test_a_message_has_the_sampling_parameters_of_the_engine() -> None:
    kinds = {pb.SamplingParams: SamplingParams, pb.Reasoning: Reasoning}
    for message, kind in kinds.items():
        assert {*message.DESCRIPTOR.fields_by_name} == {field.name for field in fields(kind)}


def test_images_are_taken_whole_or_refused() -> None:
    settings = ImageSettings(7, 4, 2, 2, 64, 4096, (0.5,) * 3, (0.5,) * 3)
    limits = replace(LIMITS, images=settings)
    asked = request([1, 7, 7, 2], sampling())
    asked.images.add(name=bytes(32), start=1, rows=1, columns=2)
    pixels = bytes(range(192)) * 2
    assert taken(asked, limits).images == (Image(bytes(32), 1, 1, 2, b""),)
    asked.images[0].with_pixels = True
    [image] = taken(asked, limits, pixels).images
    assert image == Image(bytes(32), 1, 1, 2, pixels)
    with pytest.raises(RefusedAttempt, match="this worker takes none"):
        submission(ID, asked, LIMITS)
    for field, value in (
        ("start", 2**32 - 1),
        ("rows", 2**31),
        ("columns", 0),
        ("name", b""),
    ):
        wrong = pb.Request()
        wrong.CopyFrom(asked)
        wrong.images[0].with_pixels = False
        setattr(wrong.images[0], field, value)
        with pytest.raises(RefusedAttempt, match=r"images\[0\]"):
            submission(ID, wrong, limits)
    both = request([7, 7, 7, 2], sampling())
    both.images.add(name=bytes(32), start=0, rows=1, columns=1, with_pixels=True)
    both.images.add(name=bytes(32), start=1, rows=1, columns=2, with_pixels=True)
    images = taken(both, limits, pixels + pixels[:192]).images
    assert [image.pixels for image in images] == [pixels[:192], pixels[192:] + pixels[:192]]
    image_alone = pb.SubmitEncode(image=asked.images[0], tenant=b"key")
    assert encode(ID, image_alone, limits, pixels).pixels == [pixels]
    image_alone.tenant = bytes(65)
    with pytest.raises(RefusedAttempt, match="tenant has 65 bytes"):
        encode(ID, image_alone, limits, pixels)
    for other in (pixels, pixels * 2):
        with pytest.raises(RefusedAttempt, match=r"images: \d+ bytes of pixels came, not 576"):
            submission(ID, both, limits, other)
    both.images[0].with_pixels = False
    images = taken(both, limits, pixels).images
    assert [image.pixels for image in images] == [b"", pixels]
    with pytest.raises(RefusedAttempt, match="bytes of pixels came, not 0"):
        submission(ID, request([1], sampling()), limits, pixels)


def test_pixels_of_an_attempt_are_bounded() -> None:
    pixels = bytearray()
    for _ in range(48):
        add_pixels(pixels, bytes(1 << 20))
    with pytest.raises(StreamError, match="more than 16777216 pixels"):
        add_pixels(pixels, b"x")
    with pytest.raises(StreamError, match="a part of pixels has 1048577 bytes"):
        add_pixels(bytearray(), bytes((1 << 20) + 1))


def test_a_request_keeps_every_field() -> None:
    params = sampling(
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        stop_token_ids=[7],
        logit_bias={5: -1.0},
        logprobs=0,
        prompt_logprobs=2,
    )
    asked = request([1, 2], params, [3], timeout_ms=1500)
    asked.cache_salt = b"tenant"
    asked.sampling.allowed_token_ids.extend([4, 5])
    asked.sampling.bad_words.add(token_ids=[4, 4])
    asked.sampling.logprob_token_ids.extend([8, 6])
    asked.sampling.reasoning.CopyFrom(pb.Reasoning(end_id=9, budget=0))
    asked.first_token_within = 0.25
    asked.waited = 0.75
    got = taken(asked)
    params = got.sampling
    assert (got.id, got.cache_salt, got.first_token_within) == (ID, b"tenant", -0.5)
    assert (got.prompt_ids, got.output_ids) == (array("i", [1, 2]), [3])
    assert params.temperature == 0.5
    assert params.seed == 2**64 - 1
    assert params.stop_token_ids == (7,)
    assert params.logit_bias == {5: -1.0}
    assert params.logprobs == 0, "logprobs=0 asks for the log probability of the token alone"
    assert (params.prompt_logprobs, params.logprob_token_ids) == (2, (8, 6))
    assert (params.allowed_token_ids, params.bad_words) == ((4, 5), ((4, 4),))
    assert params.reasoning == Reasoning(9, None, 0)
    other = taken(request([1], sampling()))
    assert (other.sampling.logprobs, other.sampling.prompt_logprobs) == (None, None)
    assert other.first_token_within == math.inf


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt_ids", b"", "prompt_ids is empty"),
        ("prompt_ids", packed_ids([100, 2]), "prompt_ids has token 100"),
        ("prompt_ids", packed_ids([1, 2**31]), "prompt_ids has token -2147483648"),
        ("prompt_ids", bytes(7), "token ids have 7 bytes, which is no multiple of 4"),
        ("output_ids", [100], "output_ids has token 100"),
        ("output_ids", [1] * 40, "more than the context of 32"),
        ("output_ids", [1] * 16, "max_tokens is 16, but output_ids has 16 already"),
        ("timeout_ms", 0, "timeout_ms is 0"),
        ("waited", math.inf, "waited is inf: give seconds, or 0"),
        ("first_token_within", -1.0, "first_token_within is -1.0: give seconds, or 0"),
        ("first_token_within", math.inf, "first_token_within is inf"),
        ("gap_cost", -1.0, "gap_cost is -1.0: give seconds, or 0"),
        ("cache_salt", bytes(65), "cache_salt has 65 bytes"),
        ("tenant", bytes(65), "tenant has 65 bytes"),
        ("request_id", b"short", "request_id must have 16 bytes"),
        ("sampling.max_tokens", 31, "more than the context of 32"),
        ("sampling.stop_token_ids", [2**31], "stop_token_ids has token"),
        ("sampling.stop_token_ids", [1] * 1025, "stop_token_ids has 1025 entries"),
        ("sampling.allowed_token_ids", [1] * 1025, "allowed_token_ids has 1025 entries"),
        ("sampling.logprob_token_ids", [100], "logprob_token_ids has token 100"),
        ("sampling.logprob_token_ids", [1, 1], "logprob_token_ids must be at most 128, each once"),
        ("sampling.logit_bias", {100: 1.0}, "logit_bias has token 100"),
        ("sampling.reasoning", {"end_id": 100}, "reasoning has token 100"),
        ("sampling.bad_words", [{"token_ids": [1, 100]}], "bad_words has token 100"),
        ("sampling.bad_words", [{}], "bad_words must be sequences"),
    ],
)
def test_an_invalid_request_is_refused_with_its_reason(field: str, value: Any, reason: str) -> None:
    good = request([1, 2], sampling())
    submission(ID, good, LIMITS)
    message, _, name = field.rpartition(".")
    part = getattr(good, message) if message else good
    part.ClearField(name)
    part.MergeFrom(type(part)(**{name: value}))
    with pytest.raises(RefusedAttempt, match=reason) as refusal:
        submission(ID, good, LIMITS)
    assert refusal.value.code == pb.FAILURE_CODE_INVALID


def test_without_handover_the_next_token_must_be_the_last() -> None:
    assert submission(ID, request([1], sampling(max_tokens=3), [4, 5]), LIMITS, handover=False)
    with pytest.raises(RefusedAttempt, match=r"max_tokens is 3, .* computes only token 2: set handover"):
        submission(ID, request([1], sampling(max_tokens=3), [4]), LIMITS, handover=False)


def test_the_last_position_of_the_context_can_be_used() -> None:
    assert submission(ID, request([1, 2], sampling(max_tokens=30)), LIMITS)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "h" * 256 + ":1", "\n:1", "ü:1", "h: 1"],
)
def test_a_kv_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(RefusedAttempt, match="kv_address"):
        source(pb.PrefillSource(prefill_id=b"x" * 16, kv_address=address, incarnation=1))


def test_an_id_without_16_bytes_breaks_the_protocol() -> None:
    with pytest.raises(StreamError, match="decode_id must have 16 bytes, not 15"):
        attempt_id(b"x" * 15, "decode_id")
    with pytest.raises(StreamError, match="prefill_id"):
        source(pb.PrefillSource(prefill_id=b"", kv_address="host:1", incarnation=1))


def test_output_ids_of_a_retarget_are_checked() -> None:
    def told(output_ids: list[int]) -> pb.Retarget:
        source = pb.PrefillSource(prefill_id=ID, kv_address="host:1")
        return pb.Retarget(source=source, output_ids=output_ids)

    retarget(told([1, 99]), LIMITS)
    with pytest.raises(RefusedAttempt, match="output_ids has token 100"):
        retarget(told([100]), LIMITS)
    with pytest.raises(RefusedAttempt, match="fill the context"):
        retarget(told([1] * 32), LIMITS)


def shared(*ranges: tuple[bytes, int, int], **changes: Any) -> pb.SubmitPrefill:
    """The part with ID. Each worker has an incarnation and an address of its own."""
    submit = pb.SubmitPrefill(
        prefill_id=ID, request=request([1] * 128, sampling()), handover=changes.get("handover", True)
    )
    for of, start, stop in ranges:
        submit.plan.add(
            prefill_id=of, kv_address=f"10.0.0.1:{of[0]}", incarnation=of[0], start=start, stop=stop
        )
    return submit


OTHER = b"b" * 16


def test_a_right_plan_is_taken() -> None:
    plan(shared((OTHER, 0, 64), (ID, 64, 128), (OTHER, 128, 130)))
    plan(pb.SubmitPrefill(prefill_id=ID))


def test_a_tier_of_a_newer_version_counts_as_the_slowest_of_a_worker() -> None:
    content = pb.ContentSource(kv_address="host:1", incarnation=7, tier=pb.TIER_STORE)
    found = content_source(pb.SubmitPrefill(content=content))
    assert found is not None
    assert (found.kv_address, found.incarnation, found.tier) == ("host:1", 7, pb.TIER_DISK)
    assert content_source(pb.SubmitDecode()) is None


@pytest.mark.parametrize(
    ("submit", "reason"),
    [
        (shared((OTHER, 0, 64), (ID, 64, 130)), "must end with the tokens of the request"),
        (shared((OTHER, 0, 64), (OTHER, 64, 128)), "must end with the tokens of the request"),
        (shared((OTHER, 64, 128), (ID, 128, 128)), "must follow each other"),
        (shared((OTHER, 0, 64), (ID, 65, 128)), "must follow each other"),
        (shared((OTHER, 0, 128), (ID, 128, 128)), "must follow each other"),
        (shared((OTHER, 0, 63), (ID, 63, 128)), "multiples of 64"),
        (shared((OTHER, 0, 64), (ID, 64, 128), handover=False), "needs a handover"),
        (shared((OTHER, 0, 64), (b"b" + ID[1:], 64, 128)), "one prefill_id and one address"),
        (shared(*((OTHER, 64 * i, 64 * i + 64) for i in range(300))), "more than 256 ranges"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_reason(submit: pb.SubmitPrefill, reason: str) -> None:
    with pytest.raises(RefusedAttempt, match=reason) as refused:
        plan(submit)
    assert refused.value.code == pb.FAILURE_CODE_INVALID


def test_a_plan_with_a_malformed_id_breaks_the_protocol() -> None:
    with pytest.raises(StreamError, match="16 bytes"):
        plan(shared((b"short", 0, 64), (ID, 64, 128)))


def test_an_adapter_is_part_of_the_salt() -> None:
    asked = request([1, 2], sampling())
    asked.cache_salt = b"salt"
    assert taken(asked).cache_salt == b"salt"
    asked.adapter = b"f" * 16
    found = taken(asked)
    assert (found.adapter, found.cache_salt) == (asked.adapter, with_adapter(b"salt", asked.adapter))
    asked.adapter = b"f"
    with pytest.raises(RefusedAttempt, match="adapter must have 16 bytes, not 1"):
        submission(ID, asked, LIMITS)
