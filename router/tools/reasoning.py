"""Reasoning in the text of a model: what it writes between <think> and </think>, before its answer."""

from typing import Literal

from baton.router.tools.parser import SPACE, Marker

START, END = "<think>", "</think>"

Beginning = Literal["reasoning", "answer", "either"]
"""What an output begins with. "either": it begins with reasoning if its first text is <think>."""

REASONING: dict[str, Beginning] = {
    # The model writes <think> itself, or the prompt ends with it. It may answer without reasoning.
    "qwen3": "either",
    # The model always reasons first. It may leave out <think>.
    "deepseek_r1": "reasoning",
}
"""For each way to reason, by its name for --reasoning-parser, as in vLLM: what an output begins with if the
prompt does not end with <think> or </think>."""


def beginning_after(prompt: str, way: str) -> Beginning:
    """Returns what follows this prompt. Only its end counts: messages may quote the marks."""
    prompt = prompt.rstrip(SPACE)
    if prompt.endswith(START):
        return "reasoning"
    return "answer" if prompt.endswith(END) else REASONING[way]


def continues_reasoning(message: str) -> bool:
    """True if this message of the assistant, which the output continues, ends inside its reasoning."""
    return message.rfind(START) > message.rfind(END)


def reasoning_of(template: str) -> str | None:
    """Returns how a model with this chat template reasons. None: its template knows no reasoning."""
    if START not in template and END not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


class ReasoningParser:
    """Divides one text into reasoning and content. The result does not depend on the pieces in which the text
    arrives."""

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._state: Literal["begin", "reasoning", "answer"] = "answer" if beginning == "answer" else "begin"
        self._space: list[str] = []  # what the output begins with, before any other text
        self._mark = ""  # the text that may become <think>
        self._end = Marker(END)

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next text. Returns the reasoning and the content that are certain now."""
        if self._state == "begin":
            text = self._begin(text)
        if self._state != "reasoning":
            return "", text
        reasoning, content = self._end.split(text)
        if content is None:
            return reasoning, ""
        self._state = "answer"
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """Returns the reasoning and the content that were held back, at the end of the output."""
        if self._state == "begin":
            held = "".join(self._space) + self._mark
            return (held, "") if self._beginning == "reasoning" else ("", held)
        return self._end.held, ""

    def _begin(self, text: str) -> str:
        """Holds back what may become <think>. Returns the text that belongs to the next state."""
        if not self._mark:
            mark = text.lstrip(SPACE)
            self._space.append(text[: len(text) - len(mark)])
            text = mark
        self._mark += text
        if self._mark.startswith(START):
            self._state = "reasoning"
            return self._mark[len(START) :]
        if START.startswith(self._mark):
            return ""
        self._state = "reasoning" if self._beginning == "reasoning" else "answer"
        return "".join(self._space) + self._mark
