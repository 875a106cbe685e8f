"""Child processes of a router: asked in turn, and started again after they died, whatever they died of."""

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from router.processes.children import ChildDied, Children

# Answers with its pid, its greeting and the question; dies of the question "die", and waits at "wait". At
# "kill PATH" it is killed, as long as the file has fewer than two lines, and adds one.
SCRIPT = """
import os, struct, sys, time
length = struct.Struct("<I")
def read():
    head = sys.stdin.buffer.read(length.size)
    return sys.stdin.buffer.read(*length.unpack(head)) if head else sys.exit()
def write(answer):
    sys.stdout.buffer.write(length.pack(len(answer)) + answer)
    sys.stdout.buffer.flush()
greeting = read()
if greeting == b"never":
    sys.exit(3)
write(b"")
while True:
    question = read()
    if question == b"die":
        sys.exit(4)
    if question[:5] == b"kill ":
        with open(question[5:], "a+") as file:
            file.seek(0)
            if len(file.readlines()) < 2:
                print(file=file, flush=True)
                os.kill(os.getpid(), 9)
    if question[:4] == b"wait":
        time.sleep(0.2)
    write(b"%d %b %b %b" % (os.getpid(), greeting, question, os.environ.get("BATON_API_KEY", "").encode()))
"""

COMMAND = [sys.executable, "-S", "-c", SCRIPT]
Make = Callable[..., Children]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with contextlib.AsyncExitStack() as stack:

        def made(count: int = 1, greeting: bytes = b"hello", long_bytes: float = math.inf) -> Children:
            children = Children(COMMAND, count, greeting, long_bytes=long_bytes)
            stack.push_async_callback(children.close)
            return children

        yield made


async def asked(children: Children, *parts: bytes, key: str = "") -> tuple[int, bytes]:
    pid, _, rest = (await children.ask(key, *parts)).partition(b" ")
    return int(pid), rest


async def test_one_child_answers_all(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_API_KEY", "private")
    children = make()
    first, rest = await asked(children, b"a", b"b" * 1_000_000)
    assert rest == b"hello a" + b"b" * 1_000_000 + b" ", "without the secrets of the router"
    assert await asked(children, b"c") == (first, b"hello c ")


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_child_that_died_between_questions_is_replaced(loop: Callable[[], asyncio.AbstractEventLoop]):
    async def check() -> None:
        children = Children(COMMAND, 1, b"hello")
        first, _ = await asked(children, b"a")
        os.kill(first, signal.SIGSEGV)
        [child] = children._idle
        while child._process is not None and not child._is_dead(child._process):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        second, _ = await asked(children, b"a")
        assert second != first
        await children.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


async def test_a_child_that_died_of_a_question_is_replaced(make: Make):
    children = make()
    with pytest.raises(ChildDied) as died:
        await asked(children, b"die")
    assert not died.value.blameless
    assert (await asked(children, b"a"))[1] == b"hello a "


async def test_a_child_that_never_starts_is_told_from_one_that_died_of_its_question(make: Make):
    children = make(greeting=b"never")
    for _ in range(2):
        with pytest.raises(ChildDied) as died:
            await asked(children, b"a")
        assert died.value.blameless


async def test_a_question_whose_child_is_killed_is_asked_once_more(make: Make, tmp_path: Path):
    children = make()
    for lines, killed in (("\n", False), ("", True)):
        (tmp_path / "kills").write_text(lines)
        question = b"kill " + bytes(tmp_path / "kills")
        if killed:
            with pytest.raises(ChildDied, match="exit code -9") as died:
                await asked(children, question)
            assert died.value.blameless
        else:
            assert (await asked(children, question))[1] == b"hello " + question + b" "


async def test_a_question_that_is_given_up_leaves_the_child_in_order(make: Make):
    children = make()
    first, _ = await asked(children, b"a")
    given_up = asyncio.create_task(asked(children, b"wait"))
    still_waiting = asyncio.create_task(asked(children, b"b"))
    await asyncio.sleep(0)
    given_up.cancel()
    still_waiting.cancel()
    assert await asked(children, b"c") == (first, b"hello c ")
    await asyncio.gather(given_up, still_waiting, return_exceptions=True)


async def test_keys_take_turns(make: Make):
    children = make()
    order: list[str] = []

    async def ask(key: str) -> None:
        await asked(children, bytes(100), key=key)
        order.append(key)

    await asyncio.gather(*(ask(key) for key in ["flood"] * 20 + ["other"] * 2))
    assert order.index("other") <= 2
    assert order[:6].count("other") == 2


async def test_children_work_at_the_same_time(make: Make):
    children = make(count=2)
    (first, _), (second, _) = await asyncio.gather(asked(children, b"wait"), asked(children, b"wait"))
    assert first != second


async def test_long_questions_leave_a_child_to_the_others(make: Make):
    """And the others do not starve them."""
    children = make(count=2, long_bytes=8)
    order: list[bytes] = []

    async def ask(question: bytes) -> None:
        order.append((await asked(children, question))[1].split()[1])

    # Asked first, each long one would have a child: "wait" + 5 bytes is long, and takes as long.
    questions = [b"wait-long"] * 2 + [b"a"] * 10
    await asyncio.gather(*map(ask, questions))
    assert order[:10] == [b"a"] * 10
    given_up = [asyncio.create_task(ask(question)) for question in questions]
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    assert (await asked(children, b"b"))[1] == b"hello b "
    assert not children._waiting_long
