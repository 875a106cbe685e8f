"""What `bench.choices` makes of a record."""

from baton.bench.lab.choices import Recorded, measured
from baton.rpc import worker_pb2 as pb


def test_steps_cost_what_their_worker_has_learned_from_them() -> None:
    """Two workers that have just started say that a decode takes 1 s. One learns that it takes 0.25 s, then
    0.5 s, and the other decodes nothing."""
    described = pb.WorkerDescription(num_blocks=100, block_size=16, num_layers=2, attention_doubles_at=1000)

    def report(at: float, row: int, decode: float) -> tuple[float, int, pb.WorkerStatus]:
        model = pb.StepModel(
            rows=[1, 8], decode_seconds=[decode, 2 * decode], tokens=[16, 64], prompt_seconds=[1, 2],
            overlap=1, decode_factor=1, prompt_factor=1,
        )  # fmt: skip
        return at, row, pb.WorkerStatus(step_model=model, fastest_step_seconds=decode)

    told = [(0.0, 1.0), (1.0, 1.0), (2.0, 0.25), (3.0, 0.5), (4.0, 0.5)]
    reports = [each for at, decode in told for each in (report(at, 0, decode), report(at, 1, 1.0))]
    workers = [("a", described, pb.POOL_PREFILL), ("b", described, pb.POOL_PREFILL)]
    found = measured(Recorded({}, workers, reports, {}), [1, 0], 1.0)
    assert [each.row for each in found] == [1, 0] * 5
    assert [each.at for each in found[::2]] == [0, 0, 1, 2, 3]
    first, second = found[::2], found[1::2]
    assert [each.model.decode_seconds[0] for each in first] == [1.0, 1.0, 0.25, 0.5, 0.5]
    assert [each.machine.step(1, 0.0, []) for each in first] == [0.25, 0.25, 0.5, 0.5, 0.5]
    assert [each.machine.step(1, 0.0, []) for each in second] == 5 * [1.0]
