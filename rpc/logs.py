"""How processes log: one line a record to stderr, for people (text) or for machines (json).

A configuration is plain data for `logging.config.dictConfig`, so that a process can hand it to its children,
which need nothing of ours to use it. Whose record it is (role, index, process, incarnation) is in every line;
what it is about is in `extra` (`request_id`, `attempt_id`): fields of their own in JSON, and named in the
message for people. What clients write and what models answer is never logged.
"""

from collections.abc import Mapping
from typing import Any, Literal

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

_OURS = ("router", "rpc", "worker", "prefill_worker", "decode_worker", "engine", "kv_transfer", "baton")


def log_config(style: Format, level: Level, process: Mapping[str, str | int]) -> dict[str, Any]:
    """`process` says who speaks: {"role": "prefill", "index": 0, "process": "engine", "incarnation": …}.

    `level` is for what is ours; of libraries, info and above is shown at most.
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
    libraries = "INFO" if level == "debug" else level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatters[style]},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": libraries, "handlers": ["stderr"]},
        "loggers": {logger: {"level": level.upper()} for logger in _OURS},
    }


def of_request(request_id: str, attempt_id: bytes = b"") -> dict[str, str]:
    """`extra` of a record about a request, and one attempt of it."""
    return {"request_id": request_id} | ({"attempt_id": attempt_id.hex()} if attempt_id else {})
