from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

from rich.console import Console

from cluster.display import Display
from cluster.options import (
    FrontOptions,
    LogOptions,
    ModelOptions,
    PoolOptions,
    RayOptions,
    TraceOptions,
)  # fmt: skip
from cluster.plan import Plan


def plan(**front: object) -> Plan:
    return Plan(
        ModelOptions(served_model_name="it's \"one\""), PoolOptions(), RayOptions(),
        FrontOptions(**front),  # type: ignore[arg-type]
        EngineOptions(), TransferOptions(), DeadlineOptions(), DrainOptions(), SecretOptions(), RunDirOptions(),
        LogOptions(), TraceOptions(),
    )  # fmt: skip


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
    display.ready(plan(host="0.0.0.0", port=8123, api_key=["k"]), Path("/logs"))
    [line] = [line for line in out.getvalue().splitlines() if line.strip().startswith("curl")]
    words = shlex.split(line)
    assert words[1] == "http://127.0.0.1:8123/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s "one"'
    assert "Authorization: Bearer $BATON_API_KEY" in words
    assert "/logs" in out.getvalue()
