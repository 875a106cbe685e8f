"""Logging of every process: one line per record to stderr, as text or as JSON.

A configuration is plain data for `logging.config.dictConfig`, so that a process can pass it to its children.
Each line names the process that wrote it (role, index, process, incarnation in JSON; the first three in
text). `extra` names the request (`request_id`, `attempt_id`). JSON has a field for each; a text line names
the request in its message. Prompts and answers are never logged.
"""

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Literal

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


class CountsLostLines(logging.StreamHandler):
    """Writes to stderr. A full disk loses lines: the next one that can be written says how many."""

    _lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if lost := self._lost:
            self._lost = 0
            text = "%d log lines were lost: they could not be written"
            super().emit(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, (lost,), None))
            if self._lost:
                self._lost = lost
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self._lost += 1
        else:
            super().handleError(record)


class ExceptionsWithoutText(logging.Filter):
    """Removes the text of logged exceptions, which may quote a client. Type and stack remain."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and (raised := record.exc_info[1]) is not None:
            record.exc_text = "\n".join(stack_without_text(raised))
            record.exc_info = None
        return True


def stack_without_text(raised: BaseException) -> list[str]:
    """Lines that show where an exception came from, and of which types it and its causes are."""
    cause = raised.__cause__ or (None if raised.__suppress_context__ else raised.__context__)
    lines = [] if cause is None else [*stack_without_text(cause), "", "which led to", ""]
    stack = "".join(traceback.format_tb(raised.__traceback__)).rstrip()
    return [*lines, "Traceback (most recent call last):", stack, type(raised).__qualname__]


def log_config(
    style: Format, level: Level, process: Mapping[str, str | int], *, exception_text: bool = True
) -> dict[str, Any]:
    """Returns a configuration for `logging.config.dictConfig`.

    `process` describes the process: {"role": "prefill", "index": 0, "process": "engine", "incarnation": …}.
    `level` applies to Baton's loggers. Libraries never log below info. `exception_text` is False for a
    process in which exceptions may quote a client.
    """
    name = " ".join(str(process[key]) for key in ("role", "index", "process") if key in process)
    formatters: dict[Format, dict[str, Any]] = {
        "text": {"format": f"%(asctime)s {name}: %(levelname)s %(message)s"},
        "json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "fmt": ["levelname", "name", "message"],
            "rename_fields": {"levelname": "level", "name": "logger"},
            "static_fields": dict(process),
            "timestamp": "time",
        },
    }
    handler: dict[str, Any] = {"()": f"{__name__}.CountsLostLines", "formatter": "line"}
    if not exception_text:
        handler["filters"] = ["exceptions"]
    libraries = "INFO" if level == "debug" else level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatters[style]},
        "filters": {} if exception_text else {"exceptions": {"()": f"{__name__}.ExceptionsWithoutText"}},
        "handlers": {"stderr": handler},
        "root": {"level": libraries, "handlers": ["stderr"]},
        "loggers": {"baton": {"level": level.upper()}},
    }


def of_request(request_id: str, attempt_id: bytes = b"") -> dict[str, str]:
    """Returns `extra` for a record about a request and, if `attempt_id` is given, one attempt of it."""
    return {"request_id": request_id} | ({"attempt_id": attempt_id.hex()} if attempt_id else {})
