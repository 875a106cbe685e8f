import os

import pytest

from cluster.supervision.python_path import PACKAGES, python_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, PACKAGES), ("", PACKAGES), (f"/a{os.pathsep}/b", os.pathsep.join((PACKAGES, "/a", "/b")))],
)
def test_children_import_from_the_same_places_and_this_source_first(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    assert python_path() == {"PYTHONPATH": expected, "PYTHONSAFEPATH": "1"}
