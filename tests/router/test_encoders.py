"""Images of prompts at the encoders: which one gets an image, and what follows when encoders fail."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.router import status
from baton.router.admission.parked import Parked, RetryBudget
from baton.router.admission.queue import Admission
from baton.router.config import RouterConfig
from baton.router.errors import Failed, NoWorker
from baton.router.generation.context import Services
from baton.router.metrics import Metrics
from baton.router.policy.desk import Desk
from baton.router.policy.plan import Plan
from baton.router.workers.checks import RouterModel
from baton.router.workers.pool import WorkerPool
from baton.router.workers.roster import Roster
from baton.router.workers.worker import Attempt, NotEncoded, SendQueue, Unsent, Worker, WorkerState
from baton.rpc import worker_pb2 as pb
from baton.system.tracing import Tracer
from baton.vision.images import Image
from tests.loop_clock import Clock
from tests.stand_in import stand_in

WAIT = 60.0


def image(number: int, tokens: int = 4) -> Image[memoryview]:
    return Image(bytes([number]) * 32, 0, 1, tokens, memoryview(bytes([number]) * 12))


class Fleet:
    """Two encoders, and a worker that fetches from them."""

    def __init__(self, roster: Roster | None = None) -> None:
        self.roster = roster or Roster(RouterModel("m", 9, ""), Desk(time.monotonic, seed=1), WAIT)
        self.encoders = [self.attach(f"e{i}:1", pb.POOL_ENCODE) for i in range(2)]
        self.worker = self.attach("w:1", pb.POOL_PREFILL, image_fingerprint="images=1")
        self.told: dict[str, list[Any]] = {}

    def attach(self, address: str, pool: pb.Pool, **fields: Any) -> Worker:
        worker = Worker(address, self.roster.desk, lambda: None, self.roster.breaker_changed)
        self.roster.listed[address] = worker
        fingerprint = "images=1" if pool == pb.POOL_ENCODE else "model=1"
        worker.described(
            pb.WorkerDescription(
                first_pool=pool, incarnation=hash(address) % 99, model_fingerprint=fingerprint,
                kv_address=f"kv-{address}", block_size=64, num_blocks=9, max_model_len=4096, max_num_seqs=4,
                max_num_batched_tokens=64, vocab_size=9, **fields,
            )
        )  # fmt: skip
        self.open(worker)
        return worker

    def open(self, worker: Worker) -> None:
        self.roster.accept(worker)
        worker.report(pb.WorkerStatus(health="HEALTH_SERVING", pool=worker.description.first_pool))
        worker.send_queue = SendQueue(lambda: None)
        self.roster.availability_changed(worker)

    def lose(self, worker: Worker) -> None:
        worker.send_queue, worker.state = None, WorkerState.CONNECTING
        self.roster.availability_changed(worker)

    def attempt(
        self, name: str, *images: Image[memoryview], wants: bool = True, tenant: bytes = b""
    ) -> Attempt:
        """A prompt with images, which is submitted to the worker. `wants`: encoders get its images."""
        told = self.told[name] = list[Any]()
        attempt = Attempt(
            worker=self.worker, name=name, tenant=tenant, plan=Plan("handover"),
            on_event=lambda _, event: told.append(event),
        )  # fmt: skip
        submit = pb.RouterMessage(prefill=pb.SubmitPrefill(prefill_id=attempt.id))
        self.worker.submit(attempt, submit, Tracer(None, "test", {}).begin("request", "", {}))
        attempt.images = images
        for each in images if wants else ():
            self.roster.encoders.want(attempt, each)
        return attempt

    def sent(self, worker: Worker) -> list[pb.RouterMessage]:
        """What the worker was sent since the last call, without the submits of prompts."""
        found = list[pb.RouterMessage]()
        queue = cast("SendQueue", worker.send_queue)._queue
        while not queue.empty():
            message, _ = cast("tuple[Unsent, int]", queue.get_nowait())
            if isinstance(message, memoryview):
                message = pb.RouterMessage(pixels=pb.Pixels(data=message.tobytes()))
            if not message.HasField("prefill"):
                found.append(message)
        return found

    def encode(self, worker: Worker) -> pb.SubmitEncode:
        """The one image that an encoder was sent, with its pixels."""
        pixels, submit = self.sent(worker)
        assert pixels.pixels.data == submit.encode.image.name[:12]
        return submit.encode

    def one_with_image(self) -> tuple[Worker, pb.SubmitEncode]:
        [worker] = [each for each in self.encoders if each.attached and not self.idle(each)]
        return worker, self.encode(worker)

    def idle(self, worker: Worker) -> bool:
        return cast("SendQueue", worker.send_queue)._queue.empty()

    def fail(self, worker: Worker, encode_id: bytes, code: pb.FailureCode) -> None:
        self.roster.encoders.failed(worker, pb.AttemptFailed(attempt_id=encode_id, code=code, message="why"))

    def ready(self) -> list[tuple[bytes, str]]:
        """The images that the worker can fetch, and where."""
        return [(m.image_ready.name, m.image_ready.kv_address) for m in self.sent(self.worker)]


async def test_an_image_is_encoded_once_and_its_worker_is_told() -> None:
    fleet, picture = Fleet(), image(1)
    fleet.attempt("a", picture, picture)
    fleet.attempt("b", picture)
    encoder, submit = fleet.one_with_image()
    assert (submit.image.rows, submit.image.columns, submit.name) == (1, 4, "a")
    assert fleet.ready() == []
    fleet.roster.encoders.encoded(encoder, submit.encode_id)
    kept_at = encoder.description.kv_address
    assert fleet.ready() == [(picture.name, kept_at)]
    assert fleet.roster.encoders.expected([picture]) == [0.0]
    fleet.attempt("c", picture)  # a repeated image
    assert fleet.ready() == [(picture.name, kept_at)]
    assert fleet.sent(encoder) == []
    assert fleet.roster.desk.prefills  # which encoders are not part of
    assert not fleet.roster.desk.decodes


async def test_an_image_waits_in_the_turn_of_each_key_that_wants_it() -> None:
    """Also at the encoder that gets it after the first one was lost. Pixels are sent once."""
    fleet, picture = Fleet(), image(1)
    fleet.attempt("a", picture, tenant=b"many")
    encoder, submit = fleet.one_with_image()
    assert (submit.tenant, submit.image.with_pixels) == (b"many", True)
    for name, tenant in (("b", b"many"), ("c", b"few"), ("d", b"few")):
        fleet.attempt(name, picture, tenant=tenant)
    [again] = [message.encode for message in fleet.sent(encoder)]
    assert (again.encode_id, again.tenant, again.image.with_pixels) == (submit.encode_id, b"few", False)
    fleet.lose(encoder)
    [other] = [each for each in fleet.encoders if each is not encoder]
    pixels, *submits = fleet.sent(other)
    assert pixels.HasField("pixels")
    placed = [(each.encode.tenant, each.encode.image.with_pixels) for each in submits]
    assert placed == [(b"many", True), (b"few", False)]
    fleet.roster.encoders.encoded(other, submits[0].encode.encode_id)
    assert fleet.ready() == [(picture.name, other.description.kv_address)]


async def test_a_worker_that_encodes_gets_the_pixels_that_it_asks_for() -> None:
    fleet, picture = Fleet(), image(1)
    fleet.worker.description.image_fingerprint = ""
    fleet.worker.description.kept_image_tokens = 8
    fleet.attempt("a", picture, image(2), wants=False)
    fleet.attempt("b", picture, wants=False)
    fleet.roster.encoders.wanted(fleet.worker, pb.ImageWanted(name=picture.name))
    submit = fleet.encode(fleet.worker)
    assert (submit.image.name, submit.image.with_pixels, submit.name) == (picture.name, True, "a")
    fleet.roster.encoders.wanted(fleet.worker, pb.ImageWanted(name=image(3).name))
    assert fleet.idle(fleet.worker), "no attempt of this router has it"


async def test_a_worker_gets_no_pixels_of_what_it_seems_to_have() -> None:
    fleet, first, second = Fleet(), image(1), image(2)
    worker = fleet.worker
    worker.send_pixels(first)
    assert worker.lacks_pixels(first, 0), "it asks for none"
    assert worker.lacks_pixels(first, 4)
    worker.description.kept_image_tokens = 8
    worker.send_pixels(first)
    assert not worker.lacks_pixels(first, 0)
    assert [worker.lacks_pixels(second, cached) for cached in (3, 4)] == [True, False]
    worker.send_pixels(second)
    assert not worker.lacks_pixels(first, 0)
    worker.send_pixels(image(3))
    lacks = [worker.lacks_pixels(each, 0) for each in (first, second, image(3))]
    assert lacks == [False, True, False], "the worker has dropped what it has used least recently"
    worker.lose_all()
    assert worker.lacks_pixels(first, 0), "another process may answer"


class Tokens(int):
    """Counts additions."""

    added = 0

    def __radd__(self, other: int) -> int:
        Tokens.added += 1
        return int(other) + int(self)


async def test_images_that_were_shown_before_are_not_counted_again() -> None:
    worker = Fleet().worker
    worker.description.kept_image_tokens = 4 * 100
    images = [stand_in(Image, name=bytes([i]) * 32, tokens=Tokens(4), pixels=b"") for i in range(150)]
    for each in [*images[:100], *images]:
        worker.send_pixels(each)
    assert Tokens.added == 0
    assert list(worker.shown_images) == [each.name for each in images[50:]]
    worker.lose_all()
    worker.send_pixels(images[0])
    assert worker.shown_tokens == 4


async def test_metrics_have_a_pool_of_encoders_once_there_was_one() -> None:
    """Before, a pool without workers would be an alert."""
    pool = WorkerPool(RouterConfig(model="m", secret=b"s", port=0), RouterModel("m", 9, ""))
    metrics = Metrics("m")
    metrics.follow(pool, Admission(9, pool.desk.window), Parked(RetryBudget()))
    assert 'pool="encode"' not in metrics.exposition().decode()
    fleet = Fleet(pool)
    text = metrics.exposition().decode()
    for state, count in (("ready", 2.0), ("connecting", 0.0)):
        labels = f'model_name="m",pool="encode",role="router",state="{state}"'
        assert f"baton:workers{{{labels}}} {count}" in text
    for encoder in fleet.encoders:
        fleet.lose(encoder)
    assert 'pool="encode",role="router",state="ready"} 0.0' in metrics.exposition().decode()


async def test_a_timeline_has_the_encoders_of_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    first, _ = fleet.encoders

    async def phases(worker: Worker, name: str) -> list[pb.Phase]:
        return [pb.Phase(kind="encode", seconds=0.5)] if worker is first and name == "a" else []

    monkeypatch.setattr(Worker, "phases", phases)
    monkeypatch.setattr(status.history, "timeline", lambda ended, phases: phases)
    pool = stand_in(WorkerPool, connections=[*fleet.encoders, fleet.worker], encoders=fleet.roster.encoders)
    ended: Any = SimpleNamespace(route={"a worker": fleet.worker.address})
    found: Any = SimpleNamespace(history=SimpleNamespace(find=lambda name, key: ended))
    shown = await status.request_timeline(stand_in(Services, pool=pool, metrics=found), "a")
    assert shown is not None
    assert shown.keys() == {str(first), str(fleet.worker)}
    assert [each["kind"] for each in shown[str(first)]] == ["encode"]


async def test_the_encoder_with_the_least_wait_gets_an_image() -> None:
    fleet = Fleet()
    first, second = fleet.encoders
    for worker, seconds in ((first, 0.5), (second, 0.2)):
        status = pb.WorkerStatus(
            health="HEALTH_SERVING",
            pool=pb.POOL_ENCODE,
            encode_token_seconds=0.01,
            encode_queue_seconds=seconds,
        )
        fleet.roster.reported(worker, status)
    images = [image(1, tokens=40), image(2, tokens=20), image(3)]
    assert fleet.roster.encoders.expected(images) == pytest.approx([0.6, 0.7, 0.64])
    fleet.attempt("a", image(1, tokens=40))  # 0.4 s
    assert fleet.encode(second).image.columns == 40
    fleet.attempt("b", image(2, tokens=20))
    assert fleet.encode(second).image.columns == 20
    fleet.attempt("c", image(3))
    assert fleet.encode(first).image.columns == 4


async def test_an_encoder_of_another_model_gets_none() -> None:
    fleet = Fleet()
    for encoder in fleet.encoders:
        encoder.description.model_fingerprint = "images=2"
    fleet.attempt("a", image(1))
    assert all(fleet.idle(encoder) for encoder in fleet.encoders)


async def test_another_encoder_takes_the_images_of_one_that_is_lost_or_drains() -> None:
    fleet = Fleet()
    fleet.attempt("a", image(1))
    encoder, _ = fleet.one_with_image()
    fleet.lose(encoder)
    other, again = fleet.one_with_image()
    assert other is not encoder
    fleet.open(encoder)
    fleet.fail(other, again.encode_id, pb.FAILURE_CODE_DRAINING)
    _, third = fleet.one_with_image()
    fleet.roster.encoders.encoded(other, again.encode_id)  # late
    assert fleet.ready() == []
    fleet.roster.encoders.encoded(encoder, third.encode_id)
    assert fleet.ready() == [(image(1).name, encoder.description.kv_address)]
    fleet.lose(encoder)  # with all that it kept
    fleet.attempt("b", image(1))
    fleet.encode(other)
    for each in (other, encoder):  # the second one comes back
        if not each.attached:
            fleet.open(each)
        pool, health = pb.POOL_ENCODE, pb.WorkerStatus.HEALTH_SERVING
        each.report(pb.WorkerStatus(pool=pool, health=health, encode_token_seconds=1.0))
        expected = fleet.roster.encoders.expected([image(2)])
        assert expected == [8.0 if each is other else 4.0], "its own tokens, behind those that are encoded"


async def test_an_image_that_no_encoder_can_encode_fails_its_requests() -> None:
    fleet = Fleet()
    fleet.attempt("a", image(1))
    seen = set[str]()
    for _ in range(3):
        assert fleet.told["a"] == []
        encoder, submit = fleet.one_with_image()
        seen.add(encoder.address)
        fleet.fail(encoder, submit.encode_id, pb.FAILURE_CODE_ENGINE)
    assert len(seen) == 2
    [failed] = fleet.told["a"]
    assert isinstance(failed, NotEncoded)
    assert isinstance(failed.error, Failed)
    assert "cannot be encoded, after 3 tries: why" in failed.error.message


async def test_an_image_waits_for_an_encoder_and_then_its_request_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, clock = Fleet(), Clock(monkeypatch)
    for encoder in fleet.encoders:
        fleet.lose(encoder)
    fleet.attempt("a", image(1))
    fleet.attempt("b", image(2))
    fleet.open(fleet.encoders[0])
    assert len(fleet.sent(fleet.encoders[0])) == 4
    fleet.lose(fleet.encoders[0])
    assert fleet.told == {"a": [], "b": []}
    await clock.forward(WAIT + 1)
    for name in "ab":
        [failed] = fleet.told[name]
        assert isinstance(failed.error, NoWorker)
        assert "needs an encoder, and none is ready" in failed.error.message


async def test_an_image_that_no_prompt_wants_any_more_is_cancelled() -> None:
    fleet = Fleet()
    attempts = [fleet.attempt(name, image(1)) for name in "ab"]
    encoder, submit = fleet.one_with_image()
    fleet.worker.forget(attempts[0].id)
    assert fleet.idle(encoder)
    fleet.worker.lose_all()
    [cancel] = fleet.sent(encoder)
    assert cancel.cancel.attempt_id == submit.encode_id


async def test_a_request_goes_on_if_all_of_its_images_were_dropped() -> None:
    """A router believes that an encoder keeps them."""
    fleet, pictures = Fleet(), [image(i) for i in range(8)]
    fleet.attempt("a", *pictures)
    for encoder in fleet.encoders:
        for message in fleet.sent(encoder):
            if message.HasField("encode"):
                fleet.roster.encoders.encoded(encoder, message.encode.encode_id)
    fleet.worker.lose_all()
    fleet.attempt("b", *pictures, pictures[0])
    assert len(fleet.ready()) == 2 * len(pictures) + 1
    for picture in pictures:
        fleet.roster.encoders.wanted(fleet.worker, pb.ImageWanted(name=picture.name, lost=True))
    assert fleet.told["b"] == []
    sent = [fleet.sent(encoder) for encoder in fleet.encoders]
    again = {message.encode.image.name for each in sent for message in each if message.HasField("encode")}
    assert again == {picture.name for picture in pictures}


async def test_a_worker_asks_for_what_it_lacks() -> None:
    fleet, picture = Fleet(), image(1)
    wanted = fleet.roster.encoders.wanted
    wanted(fleet.worker, pb.ImageWanted(name=picture.name))  # of another router's request
    fleet.attempt("a", picture)
    encoder, submit = fleet.one_with_image()
    wanted(fleet.worker, pb.ImageWanted(name=picture.name))  # it is on its way
    assert fleet.sent(encoder) == []
    fleet.roster.encoders.encoded(encoder, submit.encode_id)
    wanted(fleet.worker, pb.ImageWanted(name=picture.name))
    assert len(fleet.ready()) == 2
    for _ in range(3):
        wanted(fleet.worker, pb.ImageWanted(name=picture.name, lost=True))
        encoder, submit = fleet.one_with_image()
        fleet.roster.encoders.encoded(encoder, submit.encode_id)
    assert fleet.told["a"] == []
    wanted(fleet.worker, pb.ImageWanted(name=picture.name, lost=True))
    [failed] = fleet.told["a"]
    assert "could not fetch an image from the encoders, 4 times" in failed.error.message
