"""The prompts of one session: each holds what was asked and answered before.

Life of a turn: `ask` → the server answers → `heard`. A turn without `heard` was refused: what it asked comes
with the next turn.
"""

from collections.abc import Sequence

from baton.bench.load.target.answer import Answer
from baton.bench.load.target.request import Prompt, Target
from baton.bench.load.target.tokenization import Composer, Segment


class Conversation:
    def __init__(self, target: Target, composer: Composer) -> None:
        self._target, self._composer = target, composer
        self._unanswered: list[Segment] = []
        self._new = ""  # their text
        self._history = ""
        self._messages: list[dict[str, str]] = []

    def ask(self, segments: Sequence[Segment], messages: Sequence[dict[str, str]] = ()) -> Prompt:
        """The prompt of the next turn. `messages`: of a dataset, in place of segments."""
        if messages:
            return self._ask_messages(messages)
        self._unanswered += segments
        first = not (self._history or self._messages)
        self._new = self._composer.compose(self._unanswered, first=first)
        if self._target.api == "chat":
            return [*self._messages, _message("user", self._new)]
        return self._history + self._new

    def _ask_messages(self, messages: Sequence[dict[str, str]]) -> Prompt:
        if self._target.api == "chat":
            self._messages += messages
            return [*self._messages]
        self._new += "".join(f"{each['content']}\n" for each in messages)
        return self._history + self._new

    def heard(self, answer: Answer) -> None:
        """The answer becomes part of the next prompts."""
        has_question, self._unanswered = bool(self._unanswered), []
        if self._target.api == "chat":
            self._messages += [_message("user", self._new)] if has_question else []
            self._messages.append(_message("assistant", answer.text))
        elif self._target.form == "ids":
            self._history += "".join(f"{number}," for number in (self._new, *answer.token_ids))
        else:
            self._history += f"{self._new}{answer.text}\n"
        self._new = ""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
