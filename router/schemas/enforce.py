"""Rewrites schemas until the compiler takes them. For a process that is `grammars.trials.limited`."""

import json
from typing import Any

from llguidance import LLTokenizer

from baton.grammars.compiler import error_of
from baton.router.schemas.probe import Probe
from baton.router.schemas.rewriter import Rewritten, rewritten

_REMEDIES = {
    "min/maxProperties only": "counts",
    "not disjoint": "patternProperties",
    "regex": "pattern",
    "greater than maximum": "bounds",  # all values may be beyond 64 bits
}
"""What to leave out, by a part of the compiler's error."""


def enforceable(
    alphabet: LLTokenizer, schema: Any, *, forms_of_the_whole: bool = True, compiles: bool = True
) -> tuple[Rewritten, str]:
    """Returns the schema that the compiler takes, and an empty text; otherwise its error.

    `forms_of_the_whole`: the outermost schema may have alternatives. Without `compiles` the compiler is
    expected to take it. Raises ValueError."""
    probe = Probe(alphabet)
    without = frozenset[str]() if forms_of_the_whole else frozenset({"forms of the whole"})
    while True:
        made = rewritten(schema, probe, without)
        if made.schema is False:
            return made, "no value has this schema"
        error = error_of(alphabet, "json_schema", json.dumps(made.schema)) if compiles else ""
        remedies = {name for text, name in _REMEDIES.items() if text in error}
        if "regex" in error:  # of a value, of a name, or one that the compiler made of bounds
            remedies |= {"patternProperties", "bounds"}
        if error and made.has_forms and remedies <= without:
            remedies = {"forms"}
        if remedies <= without:
            return made, error
        without |= remedies
