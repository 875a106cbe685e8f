"""Patches of vLLM: which versions get them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from baton.vllm_worker import patches
from baton.vllm_worker.patches import PATCHES, Patch, mend
from baton.vllm_worker.version import TESTED
from tests.vllm_worker.played import function

pytestmark = pytest.mark.all

FIRST, LAST = TESTED
NEWER = (LAST[0], LAST[1] + 1)


def test_no_patch_stays_that_no_tested_version_needs() -> None:
    assert PATCHES
    assert all(FIRST <= patch.last <= LAST for patch in PATCHES)
    modules = (patch.function.partition(".") for patch in PATCHES)
    assert all(function(f"vllm_worker/{module}.py", name) for module, _, name in modules)


@pytest.mark.parametrize(
    ("last", "release", "applied"),
    [
        (FIRST, FIRST, True),
        (FIRST, LAST, False),
        (LAST, FIRST, True),
        (LAST, LAST, True),
        (LAST, NEWER, True),
    ],
)
def test_a_patch_is_for_versions_up_to_the_last_that_needs_it(
    last: Any, release: Any, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that is not tested gets what the last tested one needs."""
    done = list[str]()
    made = SimpleNamespace(mend_engine=lambda: done.append("engine"), mend_model=lambda: done.append("model"))
    monkeypatch.setitem(sys.modules, "baton.vllm_worker.made", made)
    found = [
        Patch("engine", lambda config: config.helps, "made.mend_engine", last),
        Patch("model", lambda _: True, "made.mend_model", last),
    ]
    monkeypatch.setattr(patches, "PATCHES", found)
    monkeypatch.setattr(patches, "installed_release", lambda: release)
    config: Any = SimpleNamespace(helps=True)
    mend("engine", config)
    assert done == ["engine"] * applied
    config.helps = False
    mend("engine", config)
    assert done == ["engine"] * applied
