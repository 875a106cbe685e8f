"""Validates bodies, and explains what is wrong with one."""

from typing import Any, TypeVar

from pydantic import ValidationError

from baton.router.api.sampling import Body
from baton.router.errors import InvalidRequest, Unsupported

B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes | bytearray) -> B:
    """Parses and validates JSON.

    Raises InvalidRequest with the field, the reason and the value that was sent.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explained(error) from None


def validate(kind: type[B], fields: dict[str, Any]) -> B:
    """Validates fields that are already parsed. Raises InvalidRequest like `parse`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}")
    if not first["loc"] and "param" not in context:
        return InvalidRequest("the body must be a JSON object")
    param = context.get("param") or _path(first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:].partition(" after validation")[0]
    if first["type"] == "unsupported":
        message = reason if "param" in context else f"{param}: {reason}"
        return Unsupported(message, param=param)
    if first["type"] == "extra_forbidden":
        return Unsupported(f"{param}: this endpoint has no such field", param=param)
    sent = "" if first["type"] in ("missing", "invalid") else f", not {_shown(first['input'])}"
    return InvalidRequest(f"{param}: {reason}{sent}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """Returns the path of a field, without the tags of unions (see `fields.tag`)."""
    named = [part for part in location if isinstance(part, int) or not part.startswith("<")]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    return path.removeprefix(".")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
