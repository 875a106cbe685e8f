"""Sessions from traces in Mooncake's format. Errors name file and line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from baton.bench.load.target.tokenization import Segment
from baton.bench.load.traffic.workload import Session, Turn

SAMPLE_TRACE = Path(__file__).parent / "samples" / "mooncake.jsonl"
MOONCAKE_BLOCK = 512  # tokens of one hash id (Mooncake, FAST 2025)

_BLOCK, _TAIL = 101, 102  # uses of a seed


class TraceLine(msgspec.Struct):
    """One request of a trace: when it was sent, its lengths, and the hash ids of its prompt's blocks."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceLine]:
    """The requests in order of time."""
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):  # noqa: B007 - the error names the line
                if text.strip():
                    lines.append(decoder.decode(text))
    except OSError as e:
        raise ValueError(f"trace {path}: {e.strerror}.") from e
    except msgspec.DecodeError as e:
        raise ValueError(
            f"trace {path}, line {number}: {e}. Give Mooncake's format, one JSON object a line: "
            '{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [1, 2]}'
        ) from e
    if not lines:
        raise ValueError(f"trace {path} is empty.")
    return sorted(lines, key=lambda line: line.timestamp)


def trace_sessions(
    lines: Sequence[TraceLine], *, seed: int, block: int, length_scale: float, least_input: int
) -> tuple[Session, ...]:
    """Sessions of one request with the lengths, times and shared blocks of the trace.

    `length_scale` scales blocks, inputs and outputs alike, so that the shared part of a prompt keeps its
    share.
    """
    scaled_block = max(1, round(block * length_scale))
    first = lines[0].timestamp
    return tuple(
        Session(
            at=(line.timestamp - first) / 1e3,
            turns=(
                Turn(
                    output_tokens=max(1, round(line.output_length * length_scale)),
                    segments=_segments(
                        line.hash_ids,
                        max(least_input, round(line.input_length * length_scale)),
                        scaled_block,
                        seed,
                        index,
                    ),
                ),
            ),
        )
        for index, line in enumerate(lines)
    )


def _segments(ids: Sequence[int], length: int, block: int, seed: int, index: int) -> tuple[Segment, ...]:
    """A whole block for each id that fits.

    The rest is a part of the next block, or unique if there is none.
    """
    whole, left = divmod(length, block)
    segments = [Segment((seed, _BLOCK, i), block) for i in ids[:whole]]
    left += block * (whole - len(segments))
    if left:
        cut = len(ids) > whole
        segments.append(Segment((seed, _BLOCK, ids[whole]) if cut else (seed, _TAIL, index), left))
    return tuple(segments)
