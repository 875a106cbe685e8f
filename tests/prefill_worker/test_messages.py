"""No message of a router, in no state of an attempt, ends a worker: both roles over Baton's engine.

Messages come for attempts of another kind, twice, after the end, and for ids that are not known."""

from collections.abc import Callable, Iterator

import pytest

from baton.kv_transfer.protocol import local_messages as local
from baton.prefill_worker.parts import pair_id
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process.states import State
from tests.cluster_helpers import tiny_model
from tests.router_messages import (
    HERE,
    KINDS,
    MESSAGES,
    OTHER_STREAM,
    PART_OF_PEER,
    STREAM,
    content_at,
    new_id,
    part,
    source,
    submit_decode,
    submit_prefill,
    work,
)

from .test_random_lives import Both


@pytest.fixture(scope="module", params=[True, False], ids=["a prefix cache", "no prefix cache"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    model = tiny_model(tmp_path_factory.mktemp("messages"))
    made = Both(model, num_blocks=90, max_num_batched_tokens=16, enable_prefix_caching=request.param)
    yield made
    made.close()


def turn(worker: Both) -> None:
    worker.turn()
    if worker.engine.loop.has_work:
        worker.step()


def until(worker: Both, attempt_id: bytes, *states: State) -> None:
    """Goes on until the attempt is in one of these states."""
    for _ in range(10_000):
        if (attempt := worker.context.attempts.find(attempt_id)) is not None and attempt.state in states:
            return
        turn(worker)
    raise AssertionError(f"{attempt_id.hex()} is not in {states}")


def prefill(worker: Both, of: bytes) -> None:
    worker.roles.handle(submit_prefill(STREAM, work(of), handover=True))


def held(worker: Both, of: bytes) -> None:
    prefill(worker, of)
    until(worker, of, State.HELD)


def importing(worker: Both, of: bytes) -> None:
    asked = work(of, prompt_ids=range(202, 2, -1))  # so that the cache has nothing of it
    worker.roles.handle(submit_prefill(STREAM, asked, content=content_at()))


def fetching(worker: Both, of: bytes) -> None:
    worker.roles.handle(submit_decode(STREAM, work(of), source(new_id())))


def without_kv(worker: Both, of: bytes) -> None:
    fetching(worker, of)
    worker.turn()
    for fetch in [*worker.fetches_open]:
        worker.end_fetch(fetch)
        worker.incoming.send(local.FailedIn(fetch, "lost", False))
    until(worker, of, State.WITHOUT_KV)


def taking(worker: Both, of: bytes) -> None:
    prefill(worker, prefill_id := new_id())
    worker.roles.handle(submit_decode(STREAM, work(of), source(prefill_id, HERE)))


def taken(worker: Both, of: bytes) -> None:
    prefill(worker, of)
    worker.roles.handle(submit_decode(STREAM, work(new_id()), source(of, HERE)))


def decoding(worker: Both, of: bytes) -> None:
    worker.roles.handle(submit_decode(STREAM, work(of, max_tokens=500), None))
    until(worker, of, State.DECODING)


def closing(worker: Both, of: bytes) -> None:
    held(worker, of)
    worker.cancel(of)


def ended(worker: Both, of: bytes) -> None:
    closing(worker, of)
    worker.settle()


STATES: dict[str, Callable[[Both, bytes], object]] = {
    "an unknown one": lambda worker, of: None,
    "a queued prefill": prefill,
    "a prefill between two chunks": lambda worker, of: (prefill(worker, of), worker.step()),
    "a prefill that imports": importing,
    "a held prefill": held,
    "a prefill that a decode takes": taken,
    "a prefill that is closing": closing,
    "a prefill that has ended": ended,
    "a prefill without a handover": lambda worker, of: worker.roles.handle(
        submit_prefill(STREAM, work(of, max_tokens=1), handover=False)
    ),
    "a part": lambda worker, of: worker.roles.handle(part(of)),
    "a decode that fetches": fetching,
    "a decode without KV": without_kv,
    "a decode that takes a prefill": taking,
    "a decode that computes": lambda worker, of: worker.roles.handle(submit_decode(STREAM, work(of), None)),
    "a decode that decodes": decoding,
}


def test_each_kind_is_sent() -> None:
    kinds = {field.name for field in pb.RouterMessage.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds - {"hello", "pixels", "encode", "image_ready"} == KINDS
    sent = [message(b"x" * 16) for message in MESSAGES.values()]
    said = [pb.RouterMessage.FromString(each.data) for each in sent if isinstance(each, messages.FromRouter)]
    assert {message.WhichOneof("kind") for message in said} == KINDS


@pytest.mark.cases(1)
@pytest.mark.parametrize("state", STATES)
def test_no_message_ends_a_worker(worker: Both, state: str) -> None:
    for message in MESSAGES.values():
        attempt_id = new_id()
        STATES[state](worker, attempt_id)
        for _ in range(2):
            worker.roles.handle(message(attempt_id))
            turn(worker)
        for stream in (STREAM, OTHER_STREAM):
            worker.roles.handle(messages.Detached(stream))
        worker.settle()
        worker.forget()
        worker.fetches_open.clear()


@pytest.mark.parametrize("first", ["the part", "the other"])
@pytest.mark.parametrize("turned", [False, True], ids=["its KV leaves", "its KV comes"])
@pytest.mark.parametrize("decodes", [False, True], ids=["a prefill", "a decode"])
def test_no_attempt_gets_the_id_under_which_a_part_moves_kv(
    worker: Both, first: str, turned: bool, decodes: bool
) -> None:
    """Routers know how it is made."""
    part_id = new_id()
    pair = (PART_OF_PEER, part_id) if turned else (part_id, PART_OF_PEER)
    other = MESSAGES["a decode that fetches" if decodes else "a prefill"]
    both = [part(part_id), other(pair_id(*pair))]
    for message in both if first == "the part" else both[::-1]:
        worker.roles.handle(message)
        turn(worker)
    assert worker.failures == [pb.FAILURE_CODE_INVALID]
    worker.roles.handle(messages.Detached(STREAM))
    worker.settle()
    worker.roles.handle(both[1])
    assert worker.failures == [pb.FAILURE_CODE_INVALID], "it is free again"
    worker.roles.handle(messages.Detached(STREAM))
    worker.settle()
    worker.forget()
