"""Formulas of docstrings."""

import re
from collections.abc import Mapping


def evaluated(formula: str, terms: Mapping[str, float]) -> float:
    """Of a docstring."""
    python = re.sub(r"√(\w+)", r"\1**0.5", formula).replace("·", "*").replace("²", "**2")
    return eval(python, {}, terms)  # noqa: S307
