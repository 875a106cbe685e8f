"""Parts of transfers with `second_wire`, which the tests of the wire share."""

import os
from typing import Any

import torch

from . import second_wire as wire


def slices(n: int) -> list[tuple[dict[str, int], bytes]]:
    """`n` ≤ 16 positions of the tests' three layers, a frame for each layer, filled with noise."""
    return [
        ({"layer": i, "head_count": 2, "token_count": n, "seq": i}, os.urandom(2 * n * 2 * 16 * 4))
        for i in range(3)
    ]


def asked(lane: wire.Lane) -> bytes:
    transfer, message = lane.expect(wire.FETCH)
    assert message == [b"p" * 16, 0, [[0, 10]], [10]]
    kind, _, _, payload = lane.read()
    assert (kind, wire.unpack(payload)) == (wire.CREDIT, [4, False])  # a frame a layer, and one for the lane
    return transfer


def serve(lane: wire.Lane, transfer: bytes) -> list[tuple[dict[str, int], bytes]]:
    """A whole transfer, COMMIT first and the frames backwards, within the credit that there is."""
    frames = slices(10)
    lane.say(wire.COMMIT, [[77, -0.5, [77], [-0.5]], 3, 3 * 2560], transfer)
    for head, body in reversed(frames):
        while lane.sent == lane.granted:
            assert lane.read()[0] == wire.CREDIT
        lane.send(wire.KV, body, transfer, **head)
    return frames


def assert_pool(decode: Any, blocks: list[int], frames: list[tuple[dict[str, int], bytes]]) -> None:
    """The pool holds these bytes (noise: NaNs among them, hence integers)."""
    for head, body in frames:
        expected = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 10, 2, 16)
        assert torch.equal(decode.rows(blocks, head["layer"], 0, 10).view(torch.int32).cpu(), expected)


def ended(decode: Any, until: Any) -> Any:
    def event() -> Any:
        decode.poll()
        return decode.events.get(b"d")

    return until(event, "the fetch to end", decode.receiver)


def refused(worker: Any, until: Any, reason: str, count: int = 1) -> None:
    until(lambda: worker.stats().refused.get(reason, 0) >= count, f"{reason} to be counted")
