"""Renders chat messages with the model's Jinja template, in a sandbox.

Templates come with the model, never from a request. They get the same variables and functions as in
transformers.
"""

import json
import logging
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

log = logging.getLogger(__name__)

_END = "THE FINAL MESSAGE GOES ON HERE\v"
"""Marks the end of the final message in the rendered text. A template that strips messages removes the
\\v."""


class ChatTemplateError(ValueError):
    """The template refuses these messages. The text is for the client."""


class _Generation(jinja2.ext.Extension):
    """Accepts the tag `{% generation %}`, which marks text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template. Raises ValueError when `source` is not valid Jinja.

    Attributes:
        takes_tools: it can describe tools to the model.
        state: keyword arguments for a copy in another process.
    """

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        self.state = {"source": source, "bos_token": bos_token, "eos_token": eos_token}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        offered = {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source, globals=offered)
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        settings: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the text for the model.

        Args:
            settings: further variables of the template.
            add_generation_prompt: end the text with the head of the assistant's next message.
            continue_final_message: end the text with the content of the last message.

        Raises ChatTemplateError when the template refuses the messages or fails on them.
        """
        if continue_final_message:
            *earlier, final = messages
            messages = [*earlier, {**final, "content": final["content"] + _END}]
        variables = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        try:
            text = self._template.render({**(settings or {}), **variables})
        except Exception as error:
            # A template is a program, and may fail in any way. It works for other messages, so the cause is
            # in these messages or tools.
            kind = type(error).__name__
            if not isinstance(error, jinja2.TemplateError):
                log.warning("the model's chat template failed on a request: %s", kind)
            reason = str(error) or kind
            raise ChatTemplateError(
                f"the model's chat template does not take these messages: {reason}"
            ) from error
        return _cut_at_end(text) if continue_final_message else text


def _cut_at_end(text: str) -> str:
    """Cuts the text after the content of the last message, as transformers does.

    If the template strips messages, the content loses its trailing spaces here too.
    """
    content, end, rest = text.rpartition(_END.rstrip())
    if not end:
        raise ChatTemplateError("the model's chat template leaves out the last message: it cannot continue")
    return content if rest.startswith("\v") else content.rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
