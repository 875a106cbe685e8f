"""The three roles by hand, without Ray: docs/quickstart-cluster.md, typed on two loopback addresses."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pages import Step, typed
from tests.within import WITHIN

from .machine import Machine, until

pytestmark = pytest.mark.all


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine on which `import ray` fails."""
    machine = Machine()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('ray is not installed')")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cpu = {"BATON_DEVICE": "cpu", "BATON_DTYPE": "float32", "BATON_NUM_THREADS": "1"}
    machine.environment |= {"PYTHONPATH": str(tmp_path), "PATH": path, **cpu}
    yield machine
    machine.remove()


def test_the_quick_start_for_two_machines(machine: Machine, tmp_path: Path) -> None:
    serve = machine.baton("serve", "--port", "0", "--ray-address", "127.0.0.1:1")
    assert serve.returncode == 2
    assert "pip install -e '.[ray]'" in serve.stderr
    network = f"127.{random.randrange(1, 255)}.{random.randrange(255)}."  # so that no port is in use
    roles: list[subprocess.Popen[bytes]] = []
    starting: list[tuple[Step, Path]] = []  # roles start side by side, until a command needs them

    def missing(step: Step, log: Path) -> list[str]:
        return step.missing(log.read_text().replace(network, "10.0.0."))

    try:
        for number, step in enumerate(typed("docs/quickstart-cluster.md")):
            log = tmp_path / f"{number}.log"
            is_role = re.match(r"baton (prefill|decode|router) ", step.command)
            while starting and not is_role:
                shown = starting.pop()
                until(lambda shown=shown: None if missing(*shown) else True, WITHIN, f"{shown}")
            command = f"exec {step.command}" if is_role else step.command

            def begun(command: str = command, log: Path = log) -> subprocess.Popen[bytes]:
                with log.open("wb") as output:
                    return subprocess.Popen(
                        ["bash", "-ec", command.replace("10.0.0.", network)],
                        cwd=tmp_path,
                        env=machine.environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )

            def shows(
                begun: Callable[[], subprocess.Popen[bytes]] = begun, step: Step = step, log: Path = log
            ) -> bool | None:
                assert begun().wait(WITHIN) == 0, log.read_text()
                return None if missing(step, log) else True

            if is_role:
                roles.append(begun())
                starting.append((step, log))
            else:  # on a busy machine the router may have one worker do what the page shows on two
                until(shows, WITHIN, f"what the page shows: {step}")
        assert len(roles) == 3
        for process in roles:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(WITHIN) for process in roles] == [0, 0, 0]
        machine.assert_no_trace()
    finally:
        for process in roles:
            process.kill()
            process.wait()
