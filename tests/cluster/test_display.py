import io
import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich.console import Console

from baton.cluster.options.engine import ModelOptions
from baton.cluster.options.roles import FrontOptions
from baton.cluster.supervision.blueprint import Blueprint
from baton.cluster.supervision.display import Display


def blueprint(**front: Any) -> Blueprint:
    given = {f.name: get_type_hints(Blueprint)[f.name]() for f in fields(Blueprint)}
    given["model"] = ModelOptions(served_model_name=['it\'s "one"'])
    given["front"] = FrontOptions(**front)
    return Blueprint(**given)


def shown(terminal: bool = False) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, force_terminal=terminal, width=80, soft_wrap=True)), out


def test_without_a_terminal_a_stage_is_one_line() -> None:
    display, out = shown()
    with display:
        display.stage("prefill 0", "loading weights", 0.1)
        display.stage("prefill 0", "loading weights", 0.9)
        display.stage("prefill 0", "ready", 1.0)
    assert [line.split("s  ")[1] for line in out.getvalue().splitlines()] == [
        "prefill 0: loading weights",
        "prefill 0: ready",
    ]


@pytest.mark.all
def test_more_roles_than_the_terminal_has_lines_get_lines() -> None:
    """Rows of 1,000 roles would be drawn again with each of their changes."""
    display, out = shown(terminal=True)
    with display:
        for number in range(1000):
            display.stage(f"decode {number}", "loading weights", 0.1)
        display.stage("decode 3", "ready", 1.0)
    assert out.getvalue().splitlines()[-1].endswith(": ready")
    assert len(out.getvalue()) < 200_000


def test_a_role_has_its_check_mark_only_when_it_is_ready() -> None:
    display, out = shown(terminal=True)
    with display:
        display.stage("prefill 0", "loading weights", 1.0)
    assert "✓" not in out.getvalue()
    with display:
        display.stage("prefill 0", "ready", 1.0)
    assert "✓" in out.getvalue()


def test_the_curl_survives_the_shell() -> None:
    display, out = shown()
    display.ready(blueprint(), "http://127.0.0.1:9000", Path("/logs"), "baton stop --ray-address auto")
    assert "Stop: baton stop --ray-address auto\n" in out.getvalue()
    out.truncate(0)
    display.ready(blueprint(host="0.0.0.0", port=8123, api_key=["k"]), "http://127.0.0.1:9000", Path("/logs"))
    [line] = [line for line in out.getvalue().splitlines() if line.strip().startswith("curl")]
    words = shlex.split(line)
    assert words[1] == "http://127.0.0.1:8123/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s "one"'
    assert "Authorization: Bearer $BATON_API_KEY" in words
    assert "/logs" in out.getvalue()


def test_the_commands_that_it_names_are_found_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make serve` calls a `baton` that is on no PATH, and another one may be on it."""
    own, other = tmp_path / "own environment", tmp_path / "other"
    for directory in (own, other):
        directory.mkdir()
        (directory / "baton").write_text("#!/bin/sh\n")
        (directory / "baton").chmod(0o755)
    called = str(own / "baton")
    for path, program, expected in (
        (own, called, "baton"),
        (other, called, shlex.quote(called)),
        (tmp_path, called, shlex.quote(called)),
        (tmp_path, "/x/cli.py", "baton"),  # python -m baton.cluster.cli
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setattr("sys.argv", [program])
        display, out = shown()
        display.ready(blueprint(), "http://127.0.0.1:9000", Path("/logs"))
        assert (
            f"\nChat: {expected} chat\nWorkers: {expected} status --url http://127.0.0.1:9000\n"
            in out.getvalue()
        )
