"""The page of formats of checkpoints."""

from docs.lab.format_tools import TOOLS
from docs.lab.formats import PACKAGES, PATH, page_of, recorded


def test_the_page_has_each_format_of_each_tool_and_none_is_wrong() -> None:
    page = PATH.read_text()
    assert TOOLS.keys() == PACKAGES.keys()
    for tool, kinds in TOOLS.items():
        assert {row.kind for row in recorded(page, tool)} == {*kinds}
    assert "WRONG" not in page


def test_rows_of_tools_that_are_not_run_stay() -> None:
    page = PATH.read_text()
    assert page_of([row for tool in PACKAGES for row in recorded(page, tool)]) == page


def test_int8_activations_of_the_tool_change_little() -> None:
    """Baton leaves activations of W8A8 as they are: logits differ by at most a tenth."""
    (row,) = [row for row in recorded(PATH.read_text(), "llmcompressor") if row.kind == "W8A8"]
    assert float(row.verdict.partition("activations ")[2]) < 0.1
