"""`baton serve` as a user has it: real processes, real signals; and nothing left when it has ended."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.bench.lab.harness.streams import cases, expected
from baton.processes.tree import alive
from tests.forked.popen import adopting
from tests.within import WITHIN

from .machine import Machine, command_lines, tree, until
from .recovery import each_has, retries, ride
from .serve import START_S, Serve

CASES = cases(4, 24)
ROLES = ("prefill", "decode")
PROCESSES = ("", " engine", " transfer")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.remove()


@pytest.fixture(scope="module")
def served(machine: Machine, shallow_model_path: Path) -> Iterator[Serve]:
    """Shared by the tests up to the one that stops it. Started as shells do with `&`: SIGINT is ignored."""
    serve = Serve(machine, "--model", str(shallow_model_path), in_background=True)
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.kill()


def test_the_printed_curl_works_when_pasted(served: Serve) -> None:
    command = next(line for line in served.output().splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=WITHIN, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]


def test_status_shows_every_worker(served: Serve) -> None:
    told = served.machine.baton("status", "--json", "--url", served.url)
    assert told.returncode == 0, told.stderr
    workers = {f"{w['role']} {w['index']}": w for w in json.loads(told.stdout)["workers"]}
    assert set(workers) == {"prefill 0", "decode 0"}
    assert all(worker["state"] == "ready" for worker in workers.values())
    table = served.machine.baton("status", "--url", served.url)
    assert table.returncode == 0, table.stderr
    for words in ("prefill 0", "decode 0", "ready", "%", "restarts", socket.gethostname()):
        assert words in table.stdout


def test_workers_are_moved_without_a_secret_set_by_hand(served: Serve) -> None:
    for pool, other in (("prefill", "decode"), ("decode", "prefill")):
        moved = served.machine.baton("flip", "decode-0", pool, "--force", "--url", served.url)
        told = f"decode 0: {other} → {pool}. What runs on it goes on to its end.\n"
        assert (moved.stdout, moved.stderr) == (told, "")
        until(lambda pool=pool: served.pool_of("decode 0") == pool or None, WITHIN, "the router sees it")
    (worker,) = (each for each in served.get("/status")["workers"] if each["role"] == "decode")
    asked = served.machine.baton("status", "--worker", worker["address"], "--url", served.url)
    assert asked.returncode == 0, asked.stderr
    assert "decode 0" in asked.stdout


def test_chat_answers_and_shows_its_figures(served: Serve) -> None:
    question = ("--temperature", "0", "--advanced.max-tokens", "12", "What is the capital of Japan?")
    done = served.machine.baton("chat", "--url", served.url, *question)
    assert done.stdout, done.stderr
    assert re.search(r"first token after \d+ ms, \d+ tokens, then [\d.]+ tokens/s", done.stderr)


def test_a_port_in_use_is_an_error_before_anything_starts(served: Serve) -> None:
    done = served.machine.baton("serve", "--port", str(served.port))
    assert done.returncode == 2
    assert f"--port {served.port}" in done.stderr
    assert done.stdout == ""


def test_every_process_is_titled_with_the_port_of_its_cluster(served: Serve) -> None:
    processes = served.processes()
    lines = command_lines(served.process.pid)
    assert {"janitor", "router 0", *(f"{role} 0{p}" for role in ROLES for p in PROCESSES)} <= processes.keys()
    assert not processes.keys() & {line.partition("\0")[0].strip() for line in lines.values()}, "all of them"


def family(serve: Serve, role: str) -> list[psutil.Process]:
    """The processes of a worker, its service process first."""
    service = serve.role(role)
    assert service is not None
    return [service, *service.children(recursive=True)]


async def test_killed_and_hung_workers_come_back_and_streams_wait_for_them(served: Serve) -> None:
    """Decode's engine is killed, and the prefill worker that has to compute it all again hangs."""
    right = await expected(served.url, CASES)
    before = await asyncio.to_thread(served.incarnations)
    decode, prefill = family(served, "decode 0"), family(served, "prefill 0")

    def strike() -> None:
        engine = served.role("decode 0 engine")
        assert engine is not None
        os.kill(engine.pid, signal.SIGKILL)
        os.kill(prefill[0].pid, signal.SIGSTOP)

    await ride(served.url, right, CASES, (each_has(3), strike), felt=lambda: retries(served.url))
    assert before.keys() == {"prefill 0", "decode 0"}

    def back() -> bool | None:  # prefill later than the streams go on: decode does without it
        now = served.incarnations()
        return True if now.keys() == before.keys() and not {*now.values()} & {*before.values()} else None

    await asyncio.to_thread(until, back, WITHIN, "new incarnations of both")
    for process in [*decode, *prefill]:  # those without a parent become children of serve
        proc = Path(f"/proc/{process.pid}")
        await asyncio.to_thread(until, lambda proc=proc: None if proc.exists() else True, WITHIN, "its end")
    await asyncio.to_thread(served.assert_whole)


async def test_streams_outlive_every_process_that_is_not_of_a_role(served: Serve) -> None:
    right = await expected(served.url, CASES[:2])
    before = served.incarnations()
    roles = {p.pid for name in ("prefill 0", "decode 0", "router 0") for p in family(served, name)}
    others = [process for process in tree(served.process.pid) if process.pid not in roles]
    assert others, "at least the janitor"

    def strike() -> None:
        for process in others:
            os.kill(process.pid, signal.SIGKILL)

    await ride(served.url, right, CASES[:2], (each_has(3), strike))
    assert served.process.poll() is None, served.output()
    assert served.incarnations() == before


def test_ctrl_c_leaves_nothing(served: Serve) -> None:
    served.stop(signal.SIGINT)
    served.machine.assert_no_trace()


@pytest.mark.all
def test_a_killed_serve_leaves_nothing(machine: Machine) -> None:
    """With the embedded model, which no process checks before the roles start: that would import torch."""
    this = psutil.Process()
    before = {*this.children(recursive=True)}

    def left() -> set[psutil.Process]:
        return {process for process in this.children(recursive=True) if alive(process)} - before

    with adopting():  # also what a role starts while it dies
        serve = Serve(machine, fresh=True)
        try:
            until(lambda: serve.role("router 0"), START_S, "a router")
        finally:
            serve.kill()
        until(lambda: None if left() else True, WITHIN, "everything dies with serve")
    for orphan in {*this.children()} - before:
        os.waitpid(orphan.pid, 0)
    machine.assert_no_trace()
