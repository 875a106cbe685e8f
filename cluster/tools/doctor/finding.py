"""The result of one check, and its remedy."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

Level = Literal["good", "note", "warning", "bad"]
"""`note`: for information. `warning`: works, but slowly or unsafely. `bad`: does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. Only a warning and a bad finding have a `remedy`."""

    check: str
    found: str
    remedy: str = ""
    level: Level = field(kw_only=True)

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level in ("warning", "bad")), f"{self.check}: remedy and level"


good, note = partial(Finding, level="good"), partial(Finding, level="note")
warning, bad = partial(Finding, level="warning"), partial(Finding, level="bad")
