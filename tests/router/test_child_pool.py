"""The pool of child processes: fair turns, and a new child after one died."""

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop

from baton.processes.sandbox.client import ENDS, Child, ChildDied, End, ForkServer, Phase
from baton.router.child_pool import ChildPool
from tests.within import WITHIN, eventually

# Replies with its pid, the state and the request. The request "die" ends it, "wait" takes a while, and
# "hang PATH" makes this file first.
# "scatter" frees 100 MiB, of which the allocator can shrink nothing.
# "kill PATH" adds a line to the file and kills the child, if the file has fewer than two lines.
# With the state "starts PATH", a child does first what the file says. No process is left if PATH.no exists.
# With the state "ends PATH", the process that forks kills itself at the step that the file names, and removes
# the file before. A step has a kind of child: "queued test", "received check".
SCRIPT = """
import ctypes, os, socket, sys, time
import msgspec
from baton.processes.sandbox import helper
from baton.router import child_pool
state = sys.stdin.buffer.read()
def take(path):
    try:
        with open(path) as file:
            os.unlink(path)
            return file.read()
    except FileNotFoundError:
        return ""
if state[:7] == b"starts ":
    def fork_or_not(fork=os.fork):
        if os.path.exists(state[7:] + b".no"):
            os.unlink(state[7:] + b".no")
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()
    os.fork = fork_or_not
if state[:5] == b"ends ":
    forker, kind, kinds = os.getpid(), "", {}
    def at(step, kind):
        try:
            with open(state[5:]) as file:
                if file.read() != f"{step} {kind}":
                    return
            os.unlink(state[5:])
        except FileNotFoundError:
            return
        os.kill(forker, 9)
        while os.getppid() == forker:
            time.sleep(0.001)
    def received(sock, size, fds, recv_fds=socket.recv_fds):
        global kind
        at("queued", "check")  # no other message is sent in this step
        message = recv_fds(sock, size, fds)
        kind = message[0].decode()
        at("received", kind)
        return message
    def forked(fork=os.fork):
        pid = fork()
        kinds[pid] = kind
        if not pid:
            at("orphaned", kind)
        return pid
    def reaped(pid, options, wait4=os.wait4):
        ended = wait4(pid, options)
        at("reaped", kinds.pop(pid))
        return ended
    socket.recv_fds, os.fork, os.wait4 = received, forked, reaped
def reply(request):
    if request == b"die":
        sys.exit(4)
    if request[:5] == b"kill ":
        with open(request[5:], "a+") as file:
            file.seek(0)
            if len(file.readlines()) < 2:
                print(file=file, flush=True)
                os.kill(os.getpid(), 9)
    if request[:4] == b"hang":
        if request[5:]:
            open(request[5:], "x").close()
        time.sleep(1000)
    if request[:5] == b"gate ":
        while not os.path.exists(request[5:]):
            time.sleep(0.001)
    if request == b"scatter":
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        *parts, last = (libc.malloc(1 << 16) for _ in range(1600))
        for part in parts:
            ctypes.memset(part, 1, 1 << 16)
            libc.free(part)
    if request[:4] == b"left":
        os.pwrite(helper.SHARED, request * 1000, 0)
    if request[:4] == b"wait":
        time.sleep(0.2)
    secret = os.environ.get("BATON_API_KEY", "").encode()
    return msgspec.msgpack.encode(b"%d %b %b %b" % (os.getpid(), state, request, secret))
def serve():
    match state[:7] == b"starts " and take(state[7:]):
        case "killed":
            os.kill(os.getpid(), 9)
        case "ended":
            sys.exit(4)
        case "hung":
            time.sleep(1000)
    child_pool.serve(reply, 10.0)
helper.fork_children(int(sys.argv[1]), "test", {"test": serve}, 1 << 32)
"""

COMMAND = ["-c", SCRIPT]
ROUTER = f"""
import asyncio, sys
from baton.processes.sandbox.client import ForkServer
from baton.router.child_pool import ChildPool
async def main():
    pool = ChildPool(ForkServer({COMMAND!r}, b"hello"), "test", 1)
    print((await pool.call("", b"a"))[0].split()[0].decode(), flush=True)
    await pool.call("", b"hang " + sys.argv[1].encode())
asyncio.run(main())
"""
Make = Callable[..., ChildPool]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with contextlib.AsyncExitStack() as stack:

        def made(count: int = 1, state: bytes = b"hello", long_bytes: float = math.inf) -> ChildPool:
            server = ForkServer(COMMAND, state)
            stack.push_async_callback(server.close)
            pool = ChildPool(server, "test", count, long_bytes=long_bytes)
            stack.push_async_callback(pool.close)
            return pool

        yield made


async def call(pool: ChildPool, *parts: bytes, key: str = "") -> tuple[int, bytes]:
    answer, _ = await pool.call(key, *parts)
    pid, _, rest = answer.partition(b" ")
    return int(pid), rest


async def test_one_child_serves_all_requests_without_the_secrets_of_the_router(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "baton.py").write_text("raise RuntimeError('the working directory hides modules')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_API_KEY", "private")
    pool = make()
    first, rest = await call(pool, b"a", b"b" * 1_000_000)
    assert rest == b"hello a" + b"b" * 1_000_000 + b" ", "BATON_API_KEY is not in its environment"
    assert await call(pool, b"c") == (first, b"hello c ")


async def test_the_first_idle_child_gets_a_request(make: Make, tmp_path: Path):
    """So an agent's turn finds the tokens of the turns before it, whichever child was used last."""
    pool, gates = make(2), [tmp_path / "a", tmp_path / "b"]
    held = [asyncio.create_task(call(pool, b"gate ", bytes(gate), key=gate.name)) for gate in gates]
    pids = list[int]()
    for gate, task in zip(gates, held, strict=True):
        await asyncio.sleep(0)  # both have their child before one replies
        gate.touch()
        pids.append((await task)[0])
    assert pids[0] != pids[1]
    assert [(await call(pool, b"turn"))[0] for _ in range(2)] == [pids[0]] * 2


@pytest.mark.all
async def test_what_a_child_leaves_beside_an_answer_comes_with_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    loop, preadv, turn, turns = asyncio.get_running_loop(), os.preadv, 0, list[int]()
    files = set[int]()

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    def read(fd: int, pieces: Any, begin: int) -> int:
        turns.append(turn)
        files.add(fd)
        assert len(pieces[0]) <= 4000
        return preadv(fd, pieces, begin)

    monkeypatch.setattr("baton.processes.sandbox.client._PIECE_BYTES", 4000)
    monkeypatch.setattr(os, "preadv", read)
    pool = make()
    count()
    for request, left in ((b"left long", 9000), (b"a", 0), (b"left", 4000)):
        answer, beside = await pool.call("", request)
        assert request in answer
        assert beside == request * 1000 if left else not beside
    assert len(turns) == len(set(turns)) == 4, "a turn of the loop reads one piece"
    [shared] = files
    assert os.fstat(shared).st_size == 0, "its memory is free"
    monkeypatch.setattr(os, "preadv", lambda *args: read(*args) - 1)
    with pytest.raises(ChildDied):  # it changed the file after its answer
        await pool.call("", b"left")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shared)
    await pool.close()


async def test_a_machine_without_a_free_process_fails_one_request(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    pool = make(state=b"starts " + bytes(tmp_path / "row"))
    (tmp_path / "row.no").touch()
    with pytest.raises(ChildDied, match="exit code 11") as died:
        await call(pool, b"a")
    assert died.value.then == "fails"
    assert (await call(pool, b"a"))[1].endswith(b" a ")
    assert not caplog.records, "the process that forks went on"


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_what_follows_when_a_child_ends(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each row of the table. One that hangs sleeps, so no limit of its CPU time ends it."""

    async def walk(pool: ChildPool, phase: Phase, end: End) -> None:
        request = b"a"
        if phase == "starting":
            await pool._children[0].end()
            (tmp_path / "row").write_text(end)
        elif phase == "idle":
            pid, _ = await call(pool, b"a")
            os.kill(pid, signal.SIGKILL if end == "killed" else signal.SIGSEGV)
            [child] = pool._children
            while child._process is not None and not child._process.is_dead:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        else:
            await call(pool, b"a")
            (tmp_path / "kills").write_text("\n")
            request = {"killed": b"kill " + bytes(tmp_path / "kills"), "ended": b"die", "hung": b"hang"}[end]
        patience = 0.2 if end == "hung" else WITHIN
        monkeypatch.setattr("baton.processes.sandbox.client.HANG_SECONDS", patience)
        if ENDS[phase, end] in ("replaced", "sent again"):
            assert (await call(pool, request))[1].endswith(request + b" ")
        else:
            with pytest.raises(
                ChildDied, match="no reply for 0.2 s" if end == "hung" else "exit code 4"
            ) as died:
                await call(pool, request)
            assert died.value.then == ENDS[phase, end]
        (tmp_path / "row").unlink(missing_ok=True)
        monkeypatch.setattr("baton.processes.sandbox.client.HANG_SECONDS", WITHIN)
        assert (await call(pool, b"b"))[1].endswith(b" b "), "the next request has a child"

    async def check() -> None:
        monkeypatch.setattr("baton.processes.sandbox.client._CHECK_SECONDS", 10 * WITHIN)
        server = ForkServer(COMMAND, b"starts " + bytes(tmp_path / "row"))
        pool = ChildPool(server, "test", 1)
        for phase, end in ENDS:
            await walk(pool, phase, end)
        await pool.close()
        await server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


async def test_a_child_gives_back_what_a_request_has_freed(make: Make):
    pool = make()
    pid, _ = await call(pool, b"a")
    before = psutil.Process(pid).memory_info().rss
    await call(pool, b"scatter")
    assert (await call(pool, b"a"))[0] == pid
    assert psutil.Process(pid).memory_info().rss - before < 20 << 20


@pytest.mark.all
async def test_a_request_whose_child_is_killed_twice_fails(make: Make, tmp_path: Path):
    pool = make()
    (tmp_path / "kills").write_text("")
    with pytest.raises(ChildDied, match="exit code -9") as died:
        await call(pool, b"kill " + bytes(tmp_path / "kills"))
    assert died.value.then == "sent again"


async def test_a_cancelled_request_does_not_confuse_replies(make: Make):
    pool = make()
    first, _ = await call(pool, b"a")
    cancelled = asyncio.create_task(call(pool, b"wait"))
    still_waiting = asyncio.create_task(call(pool, b"b"))
    await asyncio.sleep(0)
    cancelled.cancel()
    still_waiting.cancel()
    assert await call(pool, b"c") == (first, b"hello c ")
    await asyncio.gather(cancelled, still_waiting, return_exceptions=True)


@pytest.mark.all
async def test_a_busy_child_dies_with_its_router(tmp_path: Path):
    """So does the process that forked it. The router is killed, and ends nothing itself."""
    hangs = tmp_path / "hangs"
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ROUTER, str(hangs), stdout=asyncio.subprocess.PIPE
    )
    assert router.stdout is not None
    child = psutil.Process(int(await router.stdout.readline()))
    family = [child, *child.parents()[:1]]
    await eventually(hangs.exists)
    router.kill()
    await router.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=WITHIN)
    assert alive == []


async def test_keys_take_turns(make: Make):
    pool = make()
    order: list[str] = []

    async def add(key: str) -> None:
        await call(pool, bytes(100), key=key)
        order.append(key)

    await asyncio.gather(*(add(key) for key in ["flood"] * 20 + ["other"] * 2))
    assert order.index("other") <= 2
    assert order[:6].count("other") == 2


async def test_a_key_with_short_requests_that_take_long_waits_for_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    pool = make()
    order: list[str] = []
    now, child_call = 0.0, Child.call

    async def timed(child: Child, parts: Any) -> tuple[bytes, memoryview]:
        nonlocal now
        now += 1.0 if parts == (b"slow",) else 0.01
        return await child_call(child, parts)

    monkeypatch.setattr(Child, "call", timed)
    monkeypatch.setattr("baton.router.admission.slots.time", SimpleNamespace(monotonic=lambda: now))

    async def add(key: str, request: bytes) -> None:
        await call(pool, request, key=key)
        order.append(key)

    await call(pool, b"a")  # the child is there
    await add("other", bytes(100_000))
    await asyncio.gather(*(add("slow", b"slow") for _ in range(4)), *(add("other", b"a") for _ in range(2)))
    assert order == ["other", "slow", "other", "other", "slow", "slow", "slow"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("known", [False, True])
async def test_one_child_stays_free_for_other_keys(make: Make, tmp_path: Path, known: bool):
    """Whether the requests of a key take long is known only when the first of them has ended."""
    pool, opens = make(count=3), tmp_path / "opens"
    if known:
        await call(pool, b"wait", key="slow")
    slow = [asyncio.create_task(call(pool, b"gate " + bytes(opens), key="slow")) for _ in range(4)]
    while not pool._slots._running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with asyncio.timeout(WITHIN):
        await call(pool, b"a", key="other")
    opens.touch()
    await asyncio.gather(*slow)


@pytest.mark.all
async def test_one_process_forks_the_children_of_several_routers_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
):
    server = ForkServer(COMMAND, b"hello")
    other = ForkServer(COMMAND, b"hello", server.fd)
    pools = [ChildPool(each, "test", 1) for each in (server, other)]
    server.start()

    async def parents() -> set[int]:
        """Of the children that both pools have now."""
        pids = [(await call(pool, b"a"))[0] for pool in pools]
        return {psutil.Process(pid).ppid() for pid in pids}

    monkeypatch.setattr("baton.processes.sandbox.client._CHECK_SECONDS", 0.1)
    [first] = await parents()
    waiting = asyncio.create_task(call(pools[0], b"wait"))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    assert (await waiting)[1] == b"hello wait "
    [second] = await parents()
    fork, patience = ForkServer.fork, iter((0.1, WITHIN))

    def stopped(server: ForkServer, kind: str) -> Any:
        """Stops the process as the second check begins, which has the short limit."""
        if kind == "check" and (limit := next(patience, None)) is not None:
            monkeypatch.setattr("baton.processes.sandbox.client.HANG_SECONDS", limit)
            if limit == WITHIN:
                os.kill(second, signal.SIGSTOP)  # its children go on
        return fork(server, kind)

    monkeypatch.setattr(ForkServer, "fork", stopped)
    await eventually(lambda: not psutil.pid_exists(second))
    [third] = await parents()
    assert len({first, second, third}) == 3
    for each in (*pools, other, server):
        await each.close()
    assert not psutil.pid_exists(third)


async def test_a_router_without_descriptors_leaves_the_process_that_forks(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    """It can check nothing, but requests of its children go on."""
    checks, pool, fork = 0, make(), ForkServer.fork
    checked = asyncio.Event()

    def crowded(server: ForkServer, kind: str) -> Any:
        nonlocal checks
        if kind != "check":
            return fork(server, kind)
        checks += 1
        if checks == 3:
            checked.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("baton.processes.sandbox.client._CHECK_SECONDS", 0.01)
    monkeypatch.setattr(ForkServer, "fork", crowded)
    first, _ = await call(pool, b"a")
    await checked.wait()
    assert (await call(pool, b"a"))[0] == first


@pytest.mark.all
async def test_the_process_that_forks_may_end_at_each_step(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """No request is lost, and none waits for its time limit."""
    monkeypatch.setattr("baton.processes.sandbox.client._CHECK_SECONDS", 0.01)
    monkeypatch.setattr("baton.processes.sandbox.client._RESTART_SECONDS", 0.0)
    monkeypatch.setattr("baton.processes.sandbox.client.HANG_SECONDS", 2 * WITHIN)
    step = tmp_path / "step"
    pool = make(state=b"ends " + bytes(step))
    await call(pool, b"a")
    steps = [f"{each} check" for each in ("queued", "received")]
    steps += [f"{each} test" for each in ("received", "orphaned", "reaped")]
    for name in steps:
        (tmp_path / "new").write_text(name)
        (tmp_path / "new").rename(step)
        async with asyncio.timeout(WITHIN):
            if name.endswith("test"):
                with pytest.raises(ChildDied) as died:
                    await call(pool, b"die")
                assert died.value.then == "refused", name
            else:
                [child] = pool._children  # of the process that is to end
                while child._process is not None and not child._process.is_dead:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            pid, rest = await call(pool, b"a")
        assert not step.exists(), name
        assert rest.endswith(b" a "), name
        assert psutil.Process(psutil.Process(pid).ppid()).ppid() == os.getpid(), f"{name}: an orphan"


async def test_children_work_at_the_same_time(make: Make):
    pool = make(count=3)
    (first, _), (second, _) = await asyncio.gather(call(pool, b"wait"), call(pool, b"wait"))
    assert first != second


async def test_one_child_stays_free_for_short_requests(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """And a long request does not starve."""
    monkeypatch.setattr("baton.router.admission.slots._LONG_SECONDS", math.inf)
    pool, opens = make(count=3, long_bytes=8), tmp_path / "opens"
    order: list[bytes] = []

    async def add(request: bytes) -> None:
        order.append((await call(pool, request))[1].split()[1])

    # Without the limit, the two long requests, which come first, would occupy both children of a key.
    requests = [b"gate " + bytes(opens)] * 2 + [b"a"] * 10
    long = [asyncio.create_task(add(request)) for request in requests[:2]]
    await asyncio.gather(*map(add, requests[2:]))
    assert order == [b"a"] * 10
    opens.touch()
    await asyncio.gather(*long)
    cancelled = [asyncio.create_task(add(request)) for request in requests]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    assert (await call(pool, b"b"))[1] == b"hello b "
