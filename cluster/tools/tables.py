"""Tables of the client commands, which fit into the terminal."""

import os
import sys
from collections.abc import Container, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

UNKNOWN = "–"
GAP = 2  # blanks between two columns
PIPE_WIDTH = 1000
Row = Mapping[str, str]
"""Cells by the name of their column."""


def console() -> Console:
    """Standard output. Without a terminal no line is cut or broken, unless COLUMNS limits its length."""
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(highlight=False, width=None if has_width else PIPE_WIDTH)


def table(rows: Sequence[Row], columns: Sequence[str], texts: Container[str]) -> Table:
    """The columns of these names. Those of `texts` begin on the left, all others are numbers."""
    grid = Table(header_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column in columns:
        grid.add_column(column, justify="left" if column in texts else "right", overflow="fold")
    for cells in rows:
        grid.add_row(*(escape(cells[column]) for column in columns))
    return grid


def fitting(rows: Sequence[Row], columns: Sequence[str], width: int) -> tuple[list[str], list[str]]:
    """The first columns, as many as fit into `width`, and the others.

    Two columns have a place at least; the text of one that is too wide is folded."""
    fit, used = 0, -GAP
    for column in columns:
        used += GAP + max(map(len, (column, *(cells[column] for cells in rows))))
        if fit >= 2 and used > width:
            break
        fit += 1
    return list(columns[:fit]), list(columns[fit:])


def more(hidden: Sequence[str]) -> Text:
    """Names columns without a place. A pipe has room for all, see `console`."""
    return Text(f"More columns in a pipe (| less -S): {', '.join(hidden)}.", "dim")
