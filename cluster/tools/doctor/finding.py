"""The result of one check, and its remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "warning", "bad"]
"""`note`: for information. `warning`: works, but slowly or unsafely. `bad`: does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. Only a warning and a bad finding have a `remedy`."""

    check: str
    level: Level
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level in ("warning", "bad")), f"{self.check}: remedy and level"


def good(check: str, found: str) -> Finding:
    return Finding(check, "good", found)


def note(check: str, found: str) -> Finding:
    return Finding(check, "note", found)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "warning", found, remedy)


def bad(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "bad", found, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if a finding is bad, else 0: a warning must not stop a deployment."""
    return int(any(finding.level == "bad" for finding in findings))
