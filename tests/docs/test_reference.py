"""The generated reference pages are those of the code."""

from __future__ import annotations

from docs.reference.generate import HERE, pages


def test_reference_pages_are_current() -> None:
    for name, text in pages().items():
        assert (HERE / name).read_text() == text, f"docs/reference/{name} is old: run `make reference`"
