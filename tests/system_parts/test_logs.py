"""One line per record, as text or JSON, that names the process and the request."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.system.logs import Format, Level, log_config

SPEAKER = {"role": "prefill", "index": 3, "process": "engine", "incarnation": "00ff"}


def written(style: Format, level: Level, **how: bool) -> list[str]:
    """Returns the log lines of a child process. Logging is global, so the test process cannot be used."""
    script = f"""
import logging.config, json
logging.config.dictConfig(json.loads({json.dumps(log_config(style, level, SPEAKER, **how))!r}))
for name in ("baton.router.generation.generation", "baton.kv", "aiohttp.server"):
    for number in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(number, "of %s", name, extra={{"request_id": "mine"}})
try:
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise ValueError("pri" + "vate") from error  # Python 3.13 logs the line
except ValueError:
    logging.getLogger("baton.worker.service_process.service").exception("it broke")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_json_lines_have_fields_for_process_request_and_exception() -> None:
    *records, broke = [json.loads(line) for line in written("json", "info")]
    assert [(r["logger"], r["level"]) for r in records] == [
        (name, level)
        for name in ("baton.router.generation.generation", "baton.kv", "aiohttp.server")
        for level in ("INFO", "WARNING")
    ]
    for record in records:
        assert (
            record.items() >= {**SPEAKER, "request_id": "mine", "message": f"of {record['logger']}"}.items()
        )
        assert record["time"].endswith("+00:00")
    assert broke["message"] == "it broke"
    assert "ZeroDivisionError" in broke["exc_info"], "the exception is in the same line"


@pytest.mark.parametrize(("level", "count"), [("debug", 8), ("info", 6), ("warning", 3), ("error", 0)])
def test_text_lines_begin_at_the_level_and_libraries_at_info(level: Level, count: int) -> None:
    lines = [line for line in written("text", level) if " of " in line and " prefill 3 engine: " in line]
    assert len(lines) == count


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_text_of_exceptions_can_be_left_out(style: Format) -> None:
    logged = "\n".join(written(style, "info", exception_text=False))
    assert "it broke" in logged
    assert "ZeroDivisionError" in logged
    assert "ValueError" in logged
    assert "line 9, in <module>" in logged, "the stack is kept"
    assert "private" not in logged
    assert "private" in "\n".join(written(style, "info"))


def test_lines_that_a_full_disk_loses_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""
import json, logging.config, os
logging.config.dictConfig(json.loads({json.dumps(log_config("text", "info", SPEAKER))!r}))
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
for number in range(50):
    logging.getLogger("baton.worker").info("lost")
os.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
logging.getLogger("baton.worker").info("there is room")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    told, after = log.read_text().splitlines()
    assert told.endswith("ERROR 50 log lines were lost: they could not be written")
    assert after.endswith("INFO there is room")
