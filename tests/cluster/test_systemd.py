"""The systemd units in deploy/systemd: the real command line takes what they say."""

import configparser
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cluster import roles, store
from baton.cluster.cli import app

UNITS = sorted((Path(__file__).parents[2] / "deploy/systemd").glob("*.service"))


def service_of(unit: Path) -> Mapping[str, str]:
    """The section `Service`. Of a key that is there several times, the last one counts."""
    read = configparser.RawConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read_string(unit.read_text())
    return read["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(unit)
    for name in ("cluster-secret", "api-keys.toml"):
        (tmp_path / name).touch()
    line = service["ExecStart"].replace("%d", str(tmp_path)).replace("/etc/baton/api", f"{tmp_path}/api")
    program, role, *flags = shlex.split(line)
    ran: list[tuple[str, Any]] = []
    monkeypatch.setattr(roles, "run_worker", lambda role, options: ran.append((role, options)))
    monkeypatch.setattr(roles, "run_router", lambda options: ran.append(("router", options)))
    monkeypatch.setattr(store, "run", lambda options: ran.append(("store", options)))
    result = CliRunner().invoke(app, [role, *flags])
    assert result.exit_code == 0, result.output
    [(started, options)] = ran
    assert (Path(program).name, unit.stem) == ("baton", f"baton-{started}")
    if started == "store":
        assert options.secret.cluster_secret_file is None, "any peer may read the memory of its processes"
    else:
        assert options.secret.cluster_secret_file == tmp_path / "cluster-secret"
        assert float(service["TimeoutStopSec"]) > options.drain.drain_timeout, "else systemd cuts a drain off"
        assert service["KillMode"] == "mixed", "else the children of a process that drains end, too"
    if started == "router":  # a credential would stay as it was at the start
        assert options.front.api_key_file == tmp_path / "api-keys.toml"
        assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["Restart"] == "always"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_a_unit_writes_goes_to_a_directory_that_it_may_write(unit: Path) -> None:
    service = service_of(unit)
    assert (service["ProtectSystem"], service["ProtectHome"]) == ("strict", "read-only")
    variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit.read_text(), re.M))
    # The caches of Hugging Face and of `cluster.model`, then Triton's, which are in the home otherwise.
    if unit.stem == "baton-store":
        return  # it writes nothing
    caches = ["XDG_CACHE_HOME"] if unit.stem == "baton-router" else ["XDG_CACHE_HOME", "TRITON_CACHE_DIR"]
    for name in caches:
        assert Path(variables[name]).is_relative_to(Path("/var/cache") / service["CacheDirectory"])


def test_there_is_one_for_each_role() -> None:
    assert [unit.stem for unit in UNITS] == ["baton-decode", "baton-prefill", "baton-router", "baton-store"]
