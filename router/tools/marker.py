"""Finds fixed texts, such as the marks of a format, in the text of a model."""

import re


class Marker:
    """Finds fixed texts in a text that arrives in pieces. Holds back a possible beginning of one."""

    def __init__(self, *texts: str) -> None:
        self._first = re.compile("|".join({re.escape(text[0]) for text in texts}))
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts)) - 1
        self.pending = ""
        self.mark = ""
        """The text that was found last."""

    def begin(self, text: str, at: int = 0) -> int:
        """Returns the first place from `at` on where a marker may begin, or be held back already."""
        if self.pending:
            return at
        match = self._first.search(text, at)
        return len(text) if match is None else match.start()

    def split(self, text: str) -> tuple[str, str | None]:
        """Takes the next text. Returns what is before the marker, and what follows it; None: it is not
        complete."""
        if self.begin(text) == len(text):
            return text, None
        text = self.pending + text
        if match := self._pattern.search(text):
            self.pending, self.mark = "", match[0]
            return text[: match.start()], text[match.end() :]
        longest = range(min(len(text), self._longest), 0, -1)
        keep = next((n for n in longest if text[len(text) - n :] in self._beginnings), 0)
        self.pending = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def take(self, character: str) -> tuple[str, bool]:
        """Returns the text that is not part of a marker, and whether a marker is complete."""
        before, after = self.split(character)
        return before, after is not None
