"""The systemd units in deploy/systemd: the real command line takes what they say."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import roles
from cluster.cli import app

UNITS = sorted((Path(__file__).parents[2] / "deploy/systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeated(dict[str, Any]):
        """A key may be there twice; the last one counts here."""

    read = configparser.RawConfigParser(strict=False, dict_type=Repeated, interpolation=None)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read_string(unit.read_text())
    service = read["Service"]
    for name in ("cluster-secret", "api-keys"):
        (tmp_path / name).touch()
    program, role, *flags = shlex.split(service["ExecStart"].replace("%d", str(tmp_path)))
    ran: list[tuple[str, Any]] = []
    monkeypatch.setattr(roles, "run_worker", lambda role, options: ran.append((role, options)))
    monkeypatch.setattr(roles, "run_router", lambda options: ran.append(("router", options)))
    result = CliRunner().invoke(app, [role, *flags])
    assert result.exit_code == 0, result.output
    [(started, options)] = ran
    assert (Path(program).name, unit.stem) == ("baton", f"baton-{started}")
    assert options.secret.cluster_secret_file == tmp_path / "cluster-secret"
    assert float(service["TimeoutStopSec"]) > options.drain.drain_timeout, "else systemd cuts a drain off"
    assert service["Restart"] == "always"


def test_there_is_one_for_each_role() -> None:
    assert [unit.stem for unit in UNITS] == ["baton-decode", "baton-prefill", "baton-router"]
