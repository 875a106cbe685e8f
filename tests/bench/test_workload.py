"""What is sent and when."""

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.bench.load.experiment import client_of, workload_of
from baton.bench.load.options import Options
from baton.bench.load.target.request import Dialect, Target
from baton.bench.load.target.tokenization import Composer, Segment, Tokenization
from baton.bench.load.traffic.dataset import read_dataset
from baton.bench.load.traffic.trace import (
    SAMPLE_TRACE,
    TraceLine,
    read_trace,
    spread,
    trace_sessions,
    until,
)
from baton.bench.load.traffic.workload import AGENTS, Arrivals, Distribution, Session, Synthetic
from tests.bench.mock_server import count_tokens
from tests.bench.support import EXACT

PLAIN = Tokenization(EXACT.words, 1.0, 0, "")


def _fixed(number: int) -> Distribution:
    return Distribution("fixed", (number,))


def _counted(text: str) -> int:
    return count_tokens({"prompt": text})


@pytest.mark.parametrize("length", [2, 3, 7, 8, 100, 2000, 30_000])
def test_a_prompt_has_exactly_its_length(length: int) -> None:
    assert _counted(Composer(EXACT).compose([Segment((1, length), length)])) == length


@pytest.mark.parametrize("lengths", [(512, 512, 1), (5, 1, 1), (1, 1, 1, 9), (2, 3), (700, 6)])
def test_the_end_of_a_prompt_gets_shorter_by_the_overhead(lengths: tuple[int, ...]) -> None:
    composer = Composer(Tokenization(EXACT.words, 1.0, 3, ""))
    prompt = composer.compose([Segment((i,), n) for i, n in enumerate(lengths)])
    assert len(prompt.split()) == sum(lengths) - 3


def test_a_shorter_segment_is_the_start_of_the_longer_one() -> None:
    def text(seed: tuple[int, ...], length: int) -> str:
        return str(Composer(PLAIN).compose([Segment(seed, length)]))

    whole = text((1, 2), 50)
    assert text((1, 2), 50) == whole
    assert whole.startswith(text((1, 2), 20) + " ")
    assert text((1, 3), 50) != whole


def test_prompts_differ_from_their_first_token() -> None:
    """No prefix cache may help a workload that shares nothing."""
    workload = Synthetic(1, _fixed(64), _fixed(4))
    composer = Composer(EXACT)
    starts = {str(composer.compose(workload.session(i).turns[0].segments))[:24] for i in range(3000)}
    assert len(starts) == 3000


def test_lengths_follow_their_distribution() -> None:
    workload = Synthetic(1, Distribution("uniform", (100, 200)), Distribution("normal", (50, 10)))
    turns = [workload.session(i).turns[0] for i in range(2000)]
    inputs = [t.input_tokens for t in turns]
    assert (min(inputs), max(inputs)) == (100, 200)
    assert np.mean(inputs) == pytest.approx(150, rel=0.02)
    assert np.mean([t.output_tokens for t in turns]) == pytest.approx(50, rel=0.02)


def test_sessions_depend_only_on_seed_and_index() -> None:
    lengths, turns = Distribution("lognormal", (100, 0.5)), Distribution("uniform", (1, 6))

    def sessions(seed: int) -> list[Session]:
        workload = Synthetic(seed, lengths, _fixed(4), turns=turns)
        return [workload.session(i) for i in range(50)]

    assert sessions(3) == sessions(3)
    assert sessions(3) != sessions(4)


def test_runs_without_a_seed_have_the_same_lengths_and_times_and_other_texts() -> None:
    """So two runs can be compared, and no prefix cache has the prompts of the second one."""
    target, exact = Target(("http://a",), "completions", "m", Dialect()), EXACT

    def run(seed: int | None) -> tuple[list[tuple[int, int]], list[float], list[str]]:
        options = Options(rate=4.0, seed=seed, input_len="uniform:9,99", output_len="uniform:1,9")
        client = client_of(options, target, asyncio.run(workload_of(options, exact)), exact)
        composer, sessions = Composer(exact, client.texts), [client.workload.session(i) for i in range(20)]
        turns = [session.turns[0] for session in sessions]
        assert client.arrivals is not None
        times = list(itertools.islice(client.arrivals.times(client.seed), 20))
        lengths = [(turn.input_tokens, turn.output_tokens) for turn in turns]
        return lengths, times, [str(composer.compose(turn.segments)) for turn in turns]

    first, second = run(None), run(None)
    assert first[:2] == second[:2]
    assert not {*first[2]} & {*second[2]}
    assert run(7) == run(7), "the same seed repeats a run"
    assert run(7)[:2] != first[:2]


def test_groups_share_only_their_prefix() -> None:
    workload = Synthetic(1, _fixed(100), _fixed(4), prefix_groups=3, prefix_len=40)
    composer = Composer(EXACT)
    prompts = [str(composer.compose(workload.session(i).turns[0].segments)) for i in range(60)]
    assert {_counted(p) for p in prompts} == {100}
    assert len({" ".join(p.split()[:40]) for p in prompts}) == 3
    assert len({" ".join(p.split()[40:46]) for p in prompts}) == 60


def test_only_later_turns_have_think_time() -> None:
    workload = Synthetic(1, _fixed(9), _fixed(4), turns=_fixed(3), think_time=_fixed(2))
    session = workload.session(0)
    assert [t.think_seconds for t in session.turns] == [0, 2, 2]
    assert len({t.segments for t in session.turns}) == 3


def test_agents_share_a_prefix_and_have_long_first_prompts() -> None:
    options = Options(prefix_len=40, prefix_groups=1, context_len=60, input_len="uniform:3,9", turns="4")
    workload = asyncio.run(workload_of(options, EXACT))
    sessions = [workload.session(i) for i in range(30)]
    prefix, own = sessions[0].turns[0].segments
    assert prefix.length == 40
    assert all(session.turns[0].segments[0] == prefix for session in sessions)
    assert all(session.turns[0].segments[1].seed != own.seed for session in sessions[1:])
    for session in sessions:
        first, *later = (turn.input_tokens for turn in session.turns)
        assert 103 <= first <= 109
        assert all(3 <= length <= 9 for length in later)


def test_the_agents_of_the_defaults_are_those_of_the_documentation() -> None:
    """Mean 1,200 new tokens, and 92 % of a later prompt as the one before."""
    drawn = Distribution.parse(str(AGENTS["input_len"]), "")
    rng = np.random.default_rng(1)
    lengths = [drawn.draw_length(rng) for _ in range(20_000)]
    assert np.mean(lengths) == pytest.approx(1200, rel=0.02)
    assert (min(lengths), max(lengths)) >= (50, 8000)


def _trace(*lines: tuple[float, int, int, list[int]]) -> list[TraceLine]:
    return [TraceLine(*line) for line in lines]


def _sessions(lines: list[TraceLine], scale: float = 1.0) -> tuple[Session, ...]:
    return trace_sessions(lines, seed=9, block=512, length_scale=scale, least_input=2)


def test_a_trace_keeps_times_lengths_and_shared_blocks() -> None:
    first, second = _sessions(_trace((5000, 1300, 20, [1, 2, 3]), (6500, 1100, 7, [1, 2, 8])))
    assert (first.at, second.at) == (0.0, 1.5)
    assert [s.length for s in first.turns[0].segments] == [512, 512, 276]
    assert (second.turns[0].input_tokens, second.turns[0].output_tokens) == (1100, 7)
    assert first.turns[0].segments[:2] == second.turns[0].segments[:2]
    assert first.turns[0].segments[2] != second.turns[0].segments[2]


def test_requests_that_begin_alike_are_one_session() -> None:
    """All share the first block. One with a single block is alone."""
    lines = _trace(
        *((at, 1300, 5, ids) for at, ids in enumerate(([0, 1, 2], [0, 7, 8], [0], [0], [0, 1, 9])))
    )
    bound = [
        session.bound
        for session in trace_sessions(
            lines, seed=9, block=512, length_scale=1, least_input=2, session_blocks=2
        )
    ]
    assert bound == [0, 1, 2, 3, 0]
    assert [session.bound for session in _sessions(lines)] == [None] * 5


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        ((0, 0, 0, 3000, 3000, 6000), (0, 1000, 2000, 3000, 4500, 6000)),
        ((0, 1000, 1000), (0, 1000, 1500)),  # the last clump is as long as the one before
        ((500, 500), (500, 500)),
        ((1, 2, 4), (1, 2, 4)),
    ],
)
def test_a_clump_is_spread_until_the_next_time_stamp(
    stamps: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = spread(_trace(*((at, 10, 1, [n]) for n, at in enumerate(stamps))))
    assert [line.timestamp for line in found] == pytest.approx(expected)
    assert [line.hash_ids for line in found] == [[n] for n in range(len(stamps))]


def test_the_first_seconds_of_a_trace_are_those_of_its_time_stamps() -> None:
    lines = _trace((1000, 9, 1, []), (1000, 9, 1, []), (2999, 9, 1, []), (3000, 9, 1, []))
    assert len(until(lines, 2.0)) == 3
    options = Options(trace=SAMPLE_TRACE, first=1.0, length_scale=0.1)
    assert asyncio.run(workload_of(options, EXACT)).count == 4


def test_tokens_without_a_hash_id_are_unique() -> None:
    """Some tools write ids of whole blocks only."""
    (one,), (other,) = (s.turns for s in _sessions(_trace((0, 1300, 20, [1, 2]), (1, 1300, 20, [1, 2]))))
    assert one.input_tokens == 1300
    assert one.segments[:2] == other.segments[:2]
    assert one.segments[2] != other.segments[2]


def test_length_scale_keeps_the_shared_share() -> None:
    first, second = _sessions(_trace((0, 1024, 100, [1, 2]), (1, 1536, 100, [1, 2, 3])), scale=0.1)
    assert [s.length for s in first.turns[0].segments] == [51, 51]
    assert second.turns[0].segments[:2] == first.turns[0].segments[:2]
    assert (second.turns[0].input_tokens, second.turns[0].output_tokens) == (154, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 1, "input_length": 5}\n', "line 1.*output_length"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2}\nnonsense\n', "line 2"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 2}\n', "line 1.*>= 0"),
        ("", "is empty"),
    ],
)
def test_the_error_of_a_broken_trace_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)
    with pytest.raises(ValueError, match=r"nowhere.*No such file"):
        read_trace(Path("nowhere"))


@pytest.mark.parametrize("read", [read_trace, partial(read_dataset, first=None, output_len=None)])
def test_a_line_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr("baton.system.lines.LONGEST_LINE", 1 << 20)
    with pytest.raises(ValueError, match=r"/dev/zero.*line 1: is longer than 1048576 bytes"):
        read(Path("/dev/zero"))


def test_the_sample_is_valid() -> None:
    lines = read_trace(SAMPLE_TRACE)
    shared = {i for line in lines for i in line.hash_ids}
    assert sum(len(line.hash_ids) for line in lines) > 2 * len(shared), "the point of the trace is its reuse"


def _times(arrivals: Arrivals, count: int, seed: int = 7) -> np.ndarray:
    return np.array(list(itertools.islice(arrivals.times(seed), count)))


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        (Arrivals(5.0), 1.0),
        (Arrivals(5.0, burstiness=0.25), 2.0),
        (Arrivals(5.0, burstiness=4.0), 0.5),
    ],
)
def test_arrivals_have_their_rate_and_variation(arrivals: Arrivals, variation: float) -> None:
    gaps = np.diff(_times(arrivals, 40_000))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert gaps.min() >= 0


def test_times_depend_only_on_arrivals_and_seed() -> None:
    assert _times(Arrivals(8.0, None), 5).tolist() == [0.0, 0.125, 0.25, 0.375, 0.5]
    arrivals = Arrivals(3.0)
    assert (_times(arrivals, 2000, 1) == _times(arrivals, 2000, 1)).all()
    assert (_times(arrivals, 2000, 1) != _times(arrivals, 2000, 2)).any()
