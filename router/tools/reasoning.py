"""Reasoning in the text of a model: what it writes between two marks, before its answer."""

from dataclasses import dataclass
from typing import Literal

from baton.router.tools.harmony import HarmonyReasoning
from baton.router.tools.json_text import SPACE
from baton.router.tools.marker import Marker

Beginning = Literal["reasoning", "answer", "either"]
"""What an output begins with. "either": it begins with reasoning if its first text is the mark."""


@dataclass(frozen=True)
class Way:
    """A way to reason."""

    beginning: Beginning = "either"
    """What an output begins with if the prompt does not end with one of the marks."""
    start: str = "<think>"
    end: str = "</think>"
    label: str = ""
    """What follows `start`, and is no reasoning."""
    newlines: bool = False
    """A newline before `end` belongs to it, and one behind it."""
    in_messages: bool = False
    """The output is a list of messages, as `harmony` reads them."""

    def beginning_after(self, prompt: str) -> Beginning:
        """Returns what follows this prompt. Only its end counts: messages may quote the marks."""
        prompt = prompt.rstrip(SPACE)
        if prompt.endswith((self.start, (self.start + self.label).rstrip(SPACE))) and not self.in_messages:
            return "reasoning"
        return "answer" if prompt.endswith(self.end) else self.beginning

    def continues_reasoning(self, message: str) -> bool:
        """True if this message of the assistant, which the output continues, ends inside its reasoning."""
        return message.rfind(self.start) > message.rfind(self.end)


REASONING: dict[str, Way] = {
    # The model writes <think> itself, or the prompt ends with it. It may answer without reasoning.
    "qwen3": Way(),
    "glm45": Way(),
    "deepseek_v3": Way(),
    "kimi_k2": Way(),
    "seed_oss": Way(start="<seed:think>", end="</seed:think>"),
    "gemma4": Way(start="<|channel>", end="<channel|>", label="thought\n"),
    "step3p5": Way(newlines=True),
    # The model always reasons first. It may leave out <think>.
    "deepseek_r1": Way("reasoning"),
    "mistral": Way(start="[THINK]", end="[/THINK]"),
    "openai_gptoss": Way("reasoning", start="<|channel|>", end="<|end|>", in_messages=True),
}
"""The ways to reason, by their names for --reasoning-parser, as in vLLM."""
# Texts that are in the chat templates of models that reason in this way. The first match counts.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("deepseek_v3", ("<think>", "<｜Assistant｜>", "thinking")),
    ("deepseek_r1", ("think>", "<｜Assistant｜>")),
    ("kimi_k2", ("think>", "<|im_middle|>")),
    ("glm45", ("think>", "<arg_key>")),
    ("step3p5", ("<think>", "<|im_start|>tool_response")),
    ("qwen3", ("<think>",)),
    ("qwen3", ("</think>",)),
)


def reasoning_of(template: str) -> str | None:
    """Returns how a model with this chat template reasons. None: its template knows no reasoning."""
    return next((way for way, marks in _MARKS if all(mark in template for mark in marks)), None)


def reasoning_parser(beginning: Beginning, way: Way) -> "ReasoningParser | HarmonyReasoning":
    """Returns a parser for one output."""
    return HarmonyReasoning() if way.in_messages else ReasoningParser(beginning, way)


class ReasoningParser:
    """Divides one text into reasoning and content. The result does not depend on the pieces in which the text
    arrives.

    Attributes:
        end: the mark that ends the reasoning.
    """

    def __init__(self, beginning: Beginning, way: Way = REASONING["qwen3"]) -> None:
        self._beginning, self._start, self._label = beginning, way.start, way.label
        self._state: Literal["begin", "reasoning", "answer"] = "answer" if beginning == "answer" else "begin"
        self._space: list[str] = []  # what the output begins with, before any other text
        self._mark = ""  # the text that may become the mark
        self._end = Marker(way.end)
        self.end = way.end
        self._newlines = way.newlines and beginning != "answer"
        self._newline = ""  # held back: the end of the reasoning may follow it

    @property
    def over(self) -> bool:
        """True if all further text is content."""
        return self._state == "answer"

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next text. Returns the reasoning and the content that are certain now."""
        if self._state == "begin":
            text = self._begin(text)
        if self._state != "reasoning":
            return "", self._without_newline(text)
        text = self._without_label(text)
        reasoning, content = self._end.split(text)
        if self._newlines and (reasoning or content is not None):
            spaced = self._newline + reasoning
            reasoning = spaced.removesuffix("\n")
            self._newline = "" if content is not None else spaced[len(reasoning) :]
        if content is None:
            return reasoning, ""
        self._state = "answer"
        return reasoning, self._without_newline(content)

    def finish(self) -> tuple[str, str]:
        """Returns the reasoning and the content that were held back, at the end of the output."""
        if self._state == "begin":
            text = "".join(self._space) + self._mark
            return (text, "") if self._beginning == "reasoning" else ("", text)
        return self._newline + self._end.pending, ""

    def _without_newline(self, answer: str) -> str:
        """The first text of the answer behind the reasoning, without its first newline."""
        if self._newlines and answer:
            self._newlines = False
            return answer.removeprefix("\n")
        return answer

    def _without_label(self, text: str) -> str:
        at = 0
        while self._label and at < len(text):
            if text[at] != self._label[0]:
                self._label = ""
                break
            self._label, at = self._label[1:], at + 1
        return text[at:]

    def _begin(self, text: str) -> str:
        """Holds back what may become the mark. Returns the text that belongs to the next state."""
        if not self._mark:
            mark = text.lstrip(SPACE)
            self._space.append(text[: len(text) - len(mark)])
            text = mark
        self._mark += text
        if self._mark.startswith(self._start):
            self._state = "reasoning"
            return self._mark[len(self._start) :]
        if self._start.startswith(self._mark):
            return ""
        self._state = "reasoning" if self._beginning == "reasoning" else "answer"
        self._newlines &= self._state == "reasoning"
        return "".join(self._space) + self._mark
