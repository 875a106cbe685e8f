"""Finds fixed texts, such as the marks of a format, in the text of a model."""

import re


class Marker:
    """Finds fixed texts in a text that arrives in pieces. Holds back a possible beginning of one."""

    def __init__(self, *texts: str) -> None:
        self._first = {text[0] for text in texts}
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts)) - 1
        self.held = ""
        self.found = ""
        """The text that was found last."""

    def split(self, text: str) -> tuple[str, str | None]:
        """Takes the next text. Returns what is before the marker, and what follows it; None: it is not
        complete."""
        if not self.held and self._first.isdisjoint(text):
            return text, None
        text = self.held + text
        if match := self._pattern.search(text):
            self.held, self.found = "", match[0]
            return text[: match.start()], text[match.end() :]
        longest = range(min(len(text), self._longest), 0, -1)
        keep = next((n for n in longest if text[len(text) - n :] in self._beginnings), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def take(self, character: str) -> tuple[str, bool]:
        """Returns the text that is not part of a marker, and whether a marker is complete."""
        before, after = self.split(character)
        return before, after is not None
