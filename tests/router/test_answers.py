"""How long answers are expected to be."""

from collections.abc import Hashable

import pytest

from baton.router.policy import answers
from baton.router.policy.answers import AnswerLengths

from .conftest import Cluster

NAMES = (7, b"key", "")
"""A session, its key, and the model."""


@pytest.mark.parametrize(
    ("ended", "emitted", "most", "expected"),
    [
        ({}, 0, 4_096, 4_096),  # nothing is known
        ({(7, b"key", ""): 100}, 0, 4_096, 100),
        ({(7, b"key", ""): 100}, 60, 4_096, 40),
        ({(7, b"key", ""): 100}, 0, 50, 50),  # no more than the client allows
        ({(7, b"key", ""): 100}, 300, 4_096, 100),  # longer than expected: as long again
        ({(8, b"key", ""): 200}, 0, 4_096, 200),  # another session of the key
        ({(8, b"other", ""): 300}, 0, 4_096, 300),  # another key
        ({(7, b"key", ""): 100, (8, b"key", ""): 900}, 0, 4_096, 100),  # its own session counts
    ],
)
def test_the_most_specific_name_that_is_known_says_what_to_expect(
    ended: dict[tuple[Hashable, ...], int], emitted: int, most: int, expected: int
) -> None:
    lengths = AnswerLengths()
    for names, tokens in ended.items():
        lengths.ended(names, tokens)
    assert lengths.expected(NAMES, emitted, most) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(NAMES, 8, True)] * 8, 4_096),  # those that are cut say only that answers are longer
        ([(NAMES, 8, True), (NAMES, 100, False)], 107),
        ([(NAMES, 100, True), ((8, b"key", ""), 300, False)], 390),  # the key has one that ended itself
    ],
)
def test_an_answer_that_its_limit_cut_would_have_been_longer(
    answers: list[tuple[tuple[Hashable, ...], int, bool]], expected: int
) -> None:
    lengths = AnswerLengths()
    for names, tokens, cut in answers:
        lengths.ended(names, tokens, cut=cut)
    assert lengths.expected(NAMES, 0, 4_096) == expected


def test_later_answers_weigh_more_and_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_NAMES", 4)
    lengths = AnswerLengths()
    for _ in range(50):
        lengths.ended(NAMES, 1_000)
    for _ in range(50):
        lengths.ended(NAMES, 10)
    assert lengths.expected(NAMES, 0, 4_096) < 20
    for session in range(100):
        lengths.ended((session, b"other", ""), 500)
    assert len(lengths) == 4
    assert lengths.expected((99, b"key", ""), 0, 4_096) == 500
    assert lengths.expected((1, b"new", ""), 0, 4_096) > 10, "the model is always in use"


async def test_an_answer_that_a_stop_string_ends_counts(cluster: Cluster) -> None:
    """One that is cut tells no length."""
    lengths = cluster.pool.desk.answers
    await cluster.complete(max_tokens=2)
    assert lengths.expected(("",), 0, 4_096) == 4_096
    stopped = await cluster.complete(max_tokens=99, stop=["France"])
    tokens = stopped["usage"]["completion_tokens"]
    assert lengths.expected(("",), 0, 4_096) == pytest.approx(2 + tokens, abs=1)
