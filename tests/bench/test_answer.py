import json

import pytest

from baton.bench.load.target.answer import Answer, Failure, Record
from baton.bench.load.target.sse import MAX_EVENT_BYTES, SSEError, SSEParser


def _event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _text(text: str, **more: object) -> bytes:
    return _event(choices=[{"index": 0, "text": text}], **more)


def _usage(completion: int, **more: object) -> dict[str, object]:
    return {"usage": {"prompt_tokens": 7, "completion_tokens": completion, **more}}


FINISH = _event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def _answer(*chunks: bytes, keep: bool = False) -> Answer:
    """Chunk i arrives at i seconds."""
    answer = Answer(Record(index=0, intended=0.0, sent=0.0), keep=keep)
    for now, chunk in enumerate(chunks):
        answer.feed(chunk, float(now))
    answer.close(float(len(chunks)))
    return answer


def test_every_chunk_with_text_is_a_token_at_its_time() -> None:
    record = _answer(_text("a"), _text("b"), _text("c"), FINISH, _event(choices=[], **_usage(3)), DONE).record
    assert record.ok
    assert record.arrivals == [0.0, 1.0, 2.0]
    assert (record.prompt_tokens, record.output_tokens, record.generated) == (7, 3, 3)
    assert record.ended == 2.0, "the end is the last token, not the closing of the stream"
    assert record.finish_reason == "length"


def test_the_role_chunk_of_a_chat_does_not_count_as_a_token() -> None:
    role = _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    said = _event(choices=[{"index": 0, "delta": {"content": "hi"}}])
    end = _event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    answer = _answer(role, said, end, DONE, keep=True)
    assert answer.record.arrivals == [1.0]
    assert answer.text == "hi"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_tokens_and_is_not_repeated_in_the_history(field: str) -> None:
    thought = _event(choices=[{"index": 0, "delta": {field: "hm"}}])
    end = _event(choices=[{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}])
    answer = _answer(thought, end, DONE, keep=True)
    assert answer.record.arrivals == [0.0, 1.0]
    assert answer.text == "ok"


def test_running_usage_counts_the_tokens_of_every_chunk() -> None:
    record = _answer(
        _text("a", **_usage(1)), _text("bcd", **_usage(4)), _text("", **_usage(5)), FINISH, DONE
    ).record
    assert record.tokens == [1, 3, 1], "also the token that had no text yet"
    assert record.arrivals == [0.0, 1.0, 2.0]
    assert record.mean_gap == pytest.approx(2.0 / 4)


def test_usage_only_with_the_last_choice_is_the_sum() -> None:
    end = _event(choices=[{"index": 0, "text": "c", "finish_reason": "stop"}], **_usage(6))
    record = _answer(_text("a"), _text("b"), end).record
    assert record.arrivals == [0.0, 1.0, 2.0]
    assert record.tokens == []
    assert record.generated == 6


def test_cached_tokens_are_recorded() -> None:
    last = _event(choices=[], **_usage(1, prompt_tokens_details={"cached_tokens": 5}))
    assert _answer(_text("a"), FINISH, last, DONE).record.cached_tokens == 5


@pytest.mark.parametrize(
    ("chunks", "failure"),
    [
        ((), Failure.HALF_STREAMED),
        ((_text("a"), b'data: {"x": 1}\n\n'), Failure.GARBAGE),
        ((_text("a"), b"data: 7\n\n"), Failure.GARBAGE),
    ],
)
def test_an_incomplete_answer_fails(chunks: tuple[bytes, ...], failure: Failure) -> None:
    """`test_client` has the failures of a server on a socket."""
    record = _answer(*chunks).record
    assert record.failure is failure
    assert record.detail


def test_the_first_failure_is_kept_and_later_data_is_ignored() -> None:
    record = _answer(_text("a"), b"data: {broken\n\n" + _text("b"), FINISH).record
    assert record.failure is Failure.GARBAGE
    assert record.arrivals == [0.0]


STREAM = (
    b": keepalive\n\n"
    + _text("a")
    + b"event: message\r\nid: 3\r\ndata: one\r\ndata:two\r\n\r\n"
    + DONE
    + b"data: re"
)


def test_events_do_not_depend_on_how_the_bytes_are_cut() -> None:
    whole = SSEParser()
    events = whole.feed(STREAM)
    assert events[1:] == [b"one\ntwo", b"[DONE]"]
    assert whole.feed(b"st\n\n") == [b"rest"]
    assert whole.comments == 1
    for size in range(1, len(STREAM)):
        parser = SSEParser()
        cut = [e for i in range(0, len(STREAM), size) for e in parser.feed(STREAM[i : i + size])]
        assert cut == events, size


def test_an_event_without_end_is_bounded() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: " + b"x" * (MAX_EVENT_BYTES // 2)) == []
    with pytest.raises(SSEError, match="more than"):
        parser.feed(b"x" * (MAX_EVENT_BYTES // 2))
