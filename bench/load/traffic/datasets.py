"""Sessions from files: ShareGPT-style conversations, and traces in Mooncake's format.

Errors name file and line.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from baton.bench.load.target.tokenization import Segment
from baton.bench.load.traffic.workload import Session, Turn

SAMPLES = Path(__file__).parent / "samples"
SAMPLE_TRACE = SAMPLES / "mooncake.jsonl"
SAMPLE_CONVERSATIONS = SAMPLES / "sharegpt.json"
MOONCAKE_BLOCK = 512  # tokens of one hash id (Mooncake, FAST 2025)

_USERS, _ASSISTANTS = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"}
_BLOCK, _TAIL = 101, 102  # uses of a seed


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Said] = []


class TraceLine(msgspec.Struct):
    """One request of a trace: when it was sent, its lengths, and the hash ids of its prompt's blocks."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int] = []


class Exchange(NamedTuple):
    """A prompt and its recorded answer. The load test asks for an answer of the same length."""

    prompt: str
    reply: str


def resolve(path: Path) -> Path:
    """The path itself; `sample` is the file that comes with Baton, unless a file has that name."""
    return SAMPLE_CONVERSATIONS if path == Path("sample") and not path.exists() else path


def read_conversations(path: Path, count: int, turns: int, seed: int) -> list[list[Exchange]]:
    """Up to `count` conversations in random order, each with up to `turns` exchanges."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (OSError, msgspec.DecodeError) as e:
        raise ValueError(
            f"--dataset {path}: {e}. Give ShareGPT-style JSON: "
            '[{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}]'
        ) from e
    sessions = [session for c in found if (session := list(_exchanges(c))[:turns])]
    if not sessions:
        raise ValueError(f"--dataset {path}: no conversation in it has a question with an answer.")
    random.Random(seed).shuffle(sessions)
    return sessions[:count]


def _exchanges(conversation: _Conversation) -> Iterator[Exchange]:
    """The questions with an answer. The first question without one ends the conversation."""
    said = [s for s in conversation.conversations if s.speaker in _USERS | _ASSISTANTS]
    if said and said[0].speaker in _ASSISTANTS:
        said = said[1:]
    for question, reply in zip(said[::2], said[1::2], strict=False):
        if question.speaker not in _USERS or reply.speaker not in _ASSISTANTS or not question.value.strip():
            return
        yield Exchange(question.value, reply.value)


def conversation_sessions(
    conversations: Sequence[Sequence[Exchange]], reply_tokens: Sequence[int]
) -> tuple[Session, ...]:
    """`reply_tokens`: the length of every reply of all conversations, in order."""
    lengths = iter(reply_tokens)
    return tuple(
        Session(tuple(Turn(output_tokens=max(1, next(lengths)), text=e.prompt) for e in conversation))
        for conversation in conversations
    )


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
