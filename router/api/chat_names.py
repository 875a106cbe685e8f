"""Names of fields in errors: an endpoint that becomes a chat completion has other names for some fields."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from baton.router.errors import ApiError

_ANTHROPIC = {
    r"messages\[\d+\].*|continue_final_message": "messages",
    r"tools\[(\d+)\]\.function(\.parameters)?": r"tools[\1].input_schema",
    r"response_format(\.json_schema\.schema)?": "output_config.format",
    r"reasoning_effort": "output_config.effort",
    r"thinking_token_budget": "thinking.budget_tokens",
}
_NAMES = {
    "messages": _ANTHROPIC,
    "count_tokens": _ANTHROPIC,
    "responses": {
        r"messages(\[\d+\].*)?": "input",
        r"tools\[(\d+)\]\.function(\.parameters)?": r"tools[\1]\2",
        r"response_format(\.json_schema\.schema)?": "text.format",
        r"reasoning_effort": "reasoning.effort",
    },
}
"""For each kind of body, the fields of a chat completion as regular expressions, and their names there."""


@contextmanager
def named_as_in(kind: str) -> Iterator[None]:
    """Errors that are raised inside name the fields of a body of this kind, instead of a chat's."""
    try:
        yield
    except ApiError as error:
        for pattern, name in _NAMES.get(kind, {}).items():
            if error.param is not None and (found := re.fullmatch(pattern, error.param)):
                field = found.expand(name) if found.re.groups else name
                error.message = error.message.replace(error.param, field, 1)
                error.param = field
                break
        raise
