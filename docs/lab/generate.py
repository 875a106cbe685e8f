"""Renders the pages of docs/lab from docs/lab/runs: `make figures`.

A run file is what `bench.report.Report` writes (`--json`). Among its keys are:

    section: page and section that show the run, such as `tables#one-engine`.
    card: name of the card, or null for a run on a CPU.
    commit: of the version that was measured.
    command: how to repeat the run. It stands here alone, as `note` does.
    note: circumstances, and what the rows cannot say.
    tried: null for a result. For an experiment a list of texts: what was tried, the result, and why it
        stayed or went. The first sentence stands on the page, and of a long one only what was tried and the
        verdict; one without a verdict is only linked. Rows of experiments stand in no table. An empty list
        is a result that is only linked.

`other` of a row is the value of what `ratio_to` names, if known. `low` and `high` are the 95 % interval of
the ratio, or of the value if there is no ratio. Without a value they are the least and the most of several
runs. What an old run does not know is null.

A page has its own headings and text. Between the marks of a section stands, for each name of a row, the
newest run. A run of tests ("bench": "tests") is one row, of the newest ones. Older runs stand in the
folder alone.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LAB = Path(__file__).parent
BLOCK = re.compile(r"<!-- generated: (\S+) -->\n.*?<!-- end -->", re.S)
PART = re.compile(r"(?<!\d)\.|\.(?!\d)")
"""Between the parts of a name. `qwen3.5` is one part."""
SENTENCE = re.compile(r"(?<=\.) (?=[A-Z`])")
VERDICT = re.compile(r"(Kept|Mended|Refuted|Removed|Not (?:built|changed|kept|removed|taken|used))\b")
SPANS = [(-1, 0), (-2, 0), (-2, -1), (-3, -1), (-3, -2), (1, 2), (2, 3), (3, 4), (1, 3), (2, 4)]
LONG = 24
"""Words that an experiment may have on a page, with its figures."""
MAX_COLUMNS = 9
MAX_BEGINNING = 4
WORDS_OF_A_TABLE = 12
"""What one table more costs a reader, in words."""
PLAIN = ("ratio", "share")
"""Units that a number needs not."""
MIN_FILLED = 0.7
"""Share of the cells of a matrix that must be filled."""
NEWEST = 6
"""Runs of tests that a section shows: the long tests have so many shards."""
TESTS = ("passed", "failed", "minutes", "seconds", "cpu")


@dataclass(frozen=True)
class Run:
    """A run file. `file`: its name, which begins with the date."""

    file: str
    content: dict[str, Any]

    def __getattr__(self, key: str) -> Any:
        return self.content.get(key)

    @property
    def link(self) -> str:
        day = self.started[:10] if len(self.started) >= 10 else None
        words = filter(None, [day, self.commit, self.card or "CPU"])
        return f"[{', '.join(words)}](runs/{self.file})"


def runs(folder: Path, section: str) -> list[Run]:
    """The runs of a section, the newest last."""
    found = [Run(path.name, json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(
        (run for run in found if run.section == section), key=lambda run: (run.started[:10], run.file)
    )


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def value(row: dict[str, Any]) -> str:
    """The value of a row with its p99, or the range of several runs."""
    if row["value"] is None:
        text = between(row)
    else:
        text = number(row["value"])
        if row.get("ratio") is None and (interval := between(row)):
            text += f" ({interval})"
    return text + (f" · {number(row['p99'])}" if row.get("p99") is not None else "")


def ratio(row: dict[str, Any]) -> str:
    if row.get("ratio") is None:
        return ""
    interval = between(row)
    return number(row["ratio"]) + (f" ({interval})" if interval else "")


def between(row: dict[str, Any]) -> str:
    return f"{number(row['low'])}–{number(row['high'])}" if row.get("low") is not None else ""


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: list[str]) -> list[str]:
    return [line(cells), f"|{'---|' * len(cells)}"]


def matrix(rows: list[dict[str, Any]], first: int, after: int) -> list[str] | None:
    """A column for each value of the parts `first` to `after` of the names. None if it has many empty cells.

    Negative numbers count from the end, as in slices. `after` 0: up to the end.
    """
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    columns: dict[str, dict[str, Any]] = {}
    for row in rows:
        parts = PART.split(row["name"])
        end = len(parts) + after if after <= 0 else after
        start = len(parts) + first if first < 0 else first
        if not 0 <= start < end <= len(parts):
            return None
        column = ".".join(parts[start:end])
        cells.setdefault(".".join([*parts[:start], *parts[end:]]), {})[column] = row
        columns.setdefault(column, row)
    if not 2 <= len(columns) <= MAX_COLUMNS:
        return None
    if len(rows) < MIN_FILLED * len(cells) * len(columns):
        return None
    units = {name: {unit(each[name]) for each in cells.values() if name in each} for name in columns}
    units_of_row = {name: {unit(row) for row in each.values()} for name, each in cells.items()}
    by_column = all(len(of_column) == 1 for of_column in units.values())
    if not by_column and any(len(of_row) > 1 for of_row in units_of_row.values()):
        return None
    titles = []
    for name in columns:
        of_column = [each[name] for each in cells.values() if name in each]
        bases = {row["ratio_to"] for row in of_column if row.get("ratio") is not None}
        if len(bases) > 1:
            return None
        words = [*(units[name] - {name} if by_column else ()), *(f"(÷ {base})" for base in bases)]
        titles.append((name, " ".join(filter(None, words))))
    if len({title for _, title in titles}) == 1:
        lines = head([titles[0][1], *columns])
    else:
        lines = head(["", *(f"{name}, {title}" if title else name for name, title in titles)])
    for name, of_row in cells.items():
        label = ", ".join(filter(None, [f"`{name}`", "" if by_column else min(units_of_row[name])]))
        found = (of_row.get(column) for column in columns)
        lines.append(line([label, *("" if row is None else cell(row) for row in found)]))
    return lines


def cell(row: dict[str, Any]) -> str:
    """The value with its ratio, bound or both in brackets."""
    of_base = ratio(row).replace("(", "").replace(")", "")
    text = f"{value(row)} ({of_base})".strip() if of_base else value(row)
    return text + bound(row)


def flat(rows: list[dict[str, Any]], *, nested: bool) -> list[str]:
    """A line for each row. If nested, a row `NAME.WORD` is a column of `NAME`. `NAME.floor` always is."""
    names = {row["name"] for row in rows}
    more = {row["name"]: row for row in rows if row["name"].rpartition(".")[0] in names}
    if not nested:
        more = {name: row for name, row in more.items() if name.endswith(".floor")}
    words = list(dict.fromkeys(name.rpartition(".")[2] for name in more))
    main = [row for row in rows if row["name"] not in more]
    bases = sorted({row["ratio_to"] for row in main if row.get("ratio") is not None})
    p99 = any(row.get("p99") is not None for row in main)
    titles = ["", "value · p99" if p99 else "value", *(f"÷ {base}" for base in bases)]
    titles += ["÷ floor" if word == "floor" else word for word in words]
    lines = head(titles)
    for row in main:
        cells = [f"`{row['name']}`", with_unit(row)]
        cells += [ratio(row) if row.get("ratio_to") == base else "" for base in bases]
        for word in words:
            other = more.get(f"{row['name']}.{word}")
            cells.append("" if other is None else ratio(other) if word == "floor" else with_unit(other))
        lines.append(line(cells))
    return lines


def unit(row: dict[str, Any]) -> str:
    return "" if row["unit"] in PLAIN else row["unit"]


def with_unit(row: dict[str, Any]) -> str:
    text = value(row)
    return f"{text} {unit(row)}".strip() + bound(row) if text else ""


def bound(row: dict[str, Any]) -> str:
    if row.get("goal") is None:
        return ""
    return f" ({'≥' if row.get('better') == 'higher' else '≤'} {number(row['goal'])})"


def words_of(lines: list[str]) -> int:
    return len(" ".join(lines).split())


def shortest(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as one table, in the form that has the fewest words."""
    forms = [flat(rows, nested=False), flat(rows, nested=True), *(matrix(rows, *span) for span in SPANS)]
    return min(filter(None, forms), key=words_of)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of a run as one table, or as one for each beginning and length of the names."""
    by_name = {row["name"]: row for row in rows}
    if not any(row.get("ratio") for row in rows if row.get("ratio_to") != "floor"):
        for name in [name for name in by_name if name.endswith(".floor")]:
            floor = by_name.pop(name)
            by_name[name.removesuffix(".floor")] |= {"ratio": floor["ratio"], "ratio_to": "floor"}
    splits = [
        partial(beginning, parts, by_length=by_length)
        for parts in range(MAX_BEGINNING + 1)
        for by_length in (False, True)
    ]
    forms = []
    for key in splits:
        groups: dict[object, list[dict[str, Any]]] = {}
        for name, row in by_name.items():
            groups.setdefault(key(name), []).append(row)
        tables = [shortest(group) for group in groups.values()]
        lines = [text for each in tables for text in [*each, ""]][:-1]
        forms.append((words_of(lines) + WORDS_OF_A_TABLE * len(tables), lines))
    return min(forms)[1]


def beginning(parts: int, name: str, *, by_length: bool) -> tuple[object, ...]:
    """The first parts of a name without their digits, which say a size, and how many parts it has."""
    found = PART.split(name)
    return *(re.sub(r"\d+", "", part) for part in found[:parts]), by_length and len(found)


def results(found: list[Run]) -> list[str]:
    """The newest row of each name below its run, and links to runs without a table."""
    newest: dict[str, tuple[dict[str, Any], Run]] = {}
    for run in found:
        if run.tried is not None:
            continue
        for row in run.results:
            newest[row["name"]] = row, run
    tables: dict[str, list[dict[str, Any]]] = {}
    for row, run in newest.values():
        tables.setdefault(run.file, []).append(row)
    lines: list[str] = []
    for run in found:
        if run.file in tables:
            lines += [run.link, "", *table(tables[run.file]), ""]
    linked = [run.link for run in found if run.tried is not None]
    return [*lines, *([f"More: {', '.join(linked)}", ""] if linked else [])]


def of_tests(found: list[Run]) -> list[str]:
    """A row for each of the newest runs that state a count. A dash: the run does not state this one."""
    names = [name for name in TESTS if any(row["name"] == name for run in found for row in run.results)]
    lines = []
    for run in found:
        values = {row["name"]: row["value"] for row in run.results}
        counts = ["–" if values.get(name) is None else f"{values[name]:,.0f}" for name in names]
        if set(counts) != {"–"}:
            lines.append(line([run.link, *counts]))
    return [*head(["run", *names]), *lines[-NEWEST:], ""]


def in_short(text: str) -> str:
    """The first sentence (what was tried: the result) and the verdict. The file of the run has the rest.

    Empty if there is no verdict, and no room for the result: what was tried alone says nothing."""
    first, *others = SENTENCE.split(text)
    verdicts = [f"{found[0]}." for found in map(VERDICT.match, others) if found]
    if len(first.split()) > LONG:
        if not verdicts:
            return ""
        first = f"{first.split(': ')[0].removesuffix('.')}."
    return " ".join((first, *verdicts))


def experiments(run: Run) -> list[str]:
    """What the page says of those of a run."""
    return [*filter(None, map(in_short, run.tried or []))]


def block(section: str, folder: Path) -> str:
    found = runs(folder, section)
    shown = [run for run in found if not experiments(run)]
    tests = (
        bool(shown)
        and all(run.bench == "tests" for run in shown)
        and any(row["name"] in TESTS for run in shown for row in run.results)
    )
    lines = of_tests(shown) if tests else results(shown)
    for run in found:
        texts = experiments(run)
        if len(texts) > 1:
            lines += [f"- [run](runs/{run.file}):", *(f"  - {text}" for text in texts)]
        else:
            lines += [f"- {text} ([run](runs/{run.file}))" for text in texts]
    return "\n".join(lines).strip("\n")


def render(page: str, folder: Path) -> str:
    """The page with the text between the marks of each section made anew."""
    return BLOCK.sub(lambda m: f"<!-- generated: {m[1]} -->\n\n{block(m[1], folder)}\n\n<!-- end -->", page)


if __name__ == "__main__":
    for path in LAB.glob("*.md"):
        path.write_text(render(path.read_text(), LAB / "runs"))
