"""Turns a Lark grammar into a regular expression with the same texts, for the inputs of custom tools.

The input is a string in the JSON of a call. There a compiler of grammars takes a regular expression and no
other grammar. The texts are those of the rules as such: the preferences of a lexer do not count. Syntax:
https://lark-parser.readthedocs.io/en/stable/grammar.html
"""

import ast
import re
from collections.abc import Iterator

MAX_REGEX = 1 << 16
"""Characters. A rule may use another one twice, and so double its length."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|(//|\#)[^\n]*)
    | (?P<name>[?!]{0,2}_?[A-Za-z][A-Za-z0-9_]*(\.-?\d+)?)
    | (?P<text>"(\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?!/)(\\.|[^/\\\n])+/[imslux]*)
    | (?P<count>~\s*\d+(\s*\.\.\s*\d+)?)
    | (?P<arrow>->\s*\w+)
    | (?P<other>\.\.|[:|()\[\]?*+,.])""",
    re.VERBOSE,
)
_STATEMENT = re.compile(r"^(?=[?!]{0,2}_?[A-Za-z][A-Za-z0-9_]*(?:\.-?\d+)?\s*:|%)", re.MULTILINE)
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][A-Za-z0-9_]*", "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}  # fmt: skip
_COMMON["FLOAT"] = rf"(?:[0-9]+[eE][+-]?[0-9]+|{_COMMON['DECIMAL']}(?:[eE][+-]?[0-9]+)?)"
_COMMON["NUMBER"] = rf"(?:{_COMMON['FLOAT']}|[0-9]+)"
_COMMON |= {f"SIGNED_{name}": f"[+-]?{_COMMON[name]}" for name in ("FLOAT", "NUMBER")}
"""Lark's library of terminals."""


class _NotRegular(Exception):
    """A rule refers to itself, the expression is too long, or the grammar has what only Lark reads."""


def regex_of(grammar: str) -> str | None:
    """Returns the expression for the rule `start`. None: there is none, or it is longer than `MAX_REGEX`.

    Raises ValueError if it is not a grammar."""
    try:
        return _Grammar(grammar).regex("start")
    except (_NotRegular, RecursionError):
        return None


class _Grammar:
    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[tuple[str, str]]] = {}
        self._found: dict[str, str] = {}
        self._open: set[str] = set()
        self._ignored = ""
        head, *statements = _STATEMENT.split(text)
        if [*_tokens(head)]:
            raise ValueError(f"a rule must have a name and a colon: {head.strip()[:40]!r}")
        ignored: list[list[tuple[str, str]]] = []
        for statement in statements:
            if statement.startswith("%"):
                self._directive(statement[1:], ignored)
                continue
            name, colon, *body = _tokens(statement)
            assert colon[1] == ":"
            if (key := _bare(name[1])) in self._rules:
                raise ValueError(f"the rule {key[:40]!r} is there twice")
            self._rules[key] = body
        if "start" not in self._rules:
            raise ValueError("it has no rule start")
        parts = [self._parsed(each, of_rule=False) for each in ignored]
        self._ignored = f"(?:{'|'.join(parts)})*" if parts else ""

    def _directive(self, statement: str, ignored: list[list[tuple[str, str]]]) -> None:
        """Reads an import of common terminals, or what may stand between terminals. The % is left out."""
        word, *rest = [*_tokens(statement)] or [("", "")]
        if word[1] == "ignore":
            ignored.append(rest)
            return
        names = [token for kind, token in rest if kind in ("name", "arrow")]
        # A name with a dot behind it is one token only if digits follow.
        if word[1] != "import" or not names or names.pop(0) != "common":
            raise _NotRegular  # %declare, %json, or an import from another file
        alias = names.pop().removeprefix("->").strip() if names[-1:] and names[-1].startswith("->") else None
        for name in names:
            if name not in _COMMON:
                raise ValueError(f"common has no terminal {name[:40]!r}")
            self._found[alias or name] = _COMMON[name]

    def regex(self, name: str) -> str:
        if name not in self._found:
            if name not in self._rules:
                raise ValueError(f"there is no rule {name[:40]!r}")
            if name in self._open:
                raise _NotRegular
            self._open.add(name)
            of_rule = not name.lstrip("_")[:1].isupper()
            found = self._parsed(self._rules[name], of_rule=of_rule)
            self._found[name] = self._ignored + found if name == "start" else found
            self._open.remove(name)
        return self._found[name]

    def _parsed(self, tokens: list[tuple[str, str]], *, of_rule: bool) -> str:
        found, at = self._alternatives(tokens, 0, of_rule=of_rule)
        if at < len(tokens):
            raise ValueError(f"unexpected {tokens[at][1][:40]!r}")
        return found

    def _alternatives(self, tokens: list[tuple[str, str]], at: int, *, of_rule: bool) -> tuple[str, int]:
        """Returns the expression of what begins at token `at`, and the place of the token behind it."""
        sequences, parts, size = [], list[str](), 0
        while at < len(tokens) and tokens[at][1] not in (")", "]"):
            kind, token = tokens[at]
            at += 1
            if token == "|":
                sequences.append("".join(parts))
                parts = []
            elif kind == "arrow":
                continue
            elif token in ("(", "["):
                inner, at = self._alternatives(tokens, at, of_rule=of_rule)
                if at == len(tokens) or tokens[at][1] != {"(": ")", "[": "]"}[token]:
                    raise ValueError(f"a bracket {token} is not closed")
                parts.append(f"(?:{inner})" + ("?" if token == "[" else ""))
                at += 1
            elif token in ("?", "*", "+") or kind == "count":
                if not parts:
                    raise ValueError(f"nothing is before {token!r}")
                if tokens[at - 2][1] in ("?", "*", "+") or tokens[at - 2][0] == "count":
                    raise ValueError(f"{token!r} follows another repetition")
                times = "{" + ",".join(re.findall(r"\d+", token)) + "}" if kind == "count" else token
                parts[-1] = f"(?:{parts[-1]}){times}"
            elif kind == "text" and tokens[at : at + 1] == [("other", "..")]:
                first, last = (_text(each) for each in (token, (tokens[at + 1 : at + 2] or [("", "")])[0][1]))
                if not len(first) == len(last) == 1:
                    raise ValueError("a range must be between two characters")
                parts.append(f"[{_escaped(first)}-{_escaped(last)}]")
                at += 2
            else:
                parts.append(self._atom(kind, token, of_rule=of_rule))
            size += len(parts[-1]) if parts else 0
            if size > MAX_REGEX:
                raise _NotRegular
        sequences.append("".join(parts))
        return sequences[0] if len(sequences) == 1 else f"(?:{'|'.join(sequences)})", at

    def _atom(self, kind: str, token: str, *, of_rule: bool) -> str:
        if kind == "name":
            found = f"(?:{self.regex(_bare(token))})"
            terminal = token.lstrip("_")[:1].isupper()
        elif kind == "text":
            text, terminal = _escaped(_text(token)), True
            found = f"(?i:{text})" if token.endswith("i") else text
        elif kind == "regex":
            body, _, flags = token[1:].rpartition("/")
            flags = "".join(sorted(set(flags) & set("imsx")))
            found, terminal = f"(?{flags}:{body})", True
            found = found.replace(r"\/", "/")
        else:
            raise ValueError(f"unexpected {token[:40]!r}")
        return f"{found}{self._ignored}" if of_rule and terminal else found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if text.startswith(("{", "<", "&", "%", "^", "}", ">", "@", ",", "~"), at):
                raise _NotRegular  # templates, and what llguidance adds
            raise ValueError(f"unexpected {text[at : at + 40]!r}")
        at = match.end()
        kind = match.lastgroup or ""
        if kind != "space":
            yield kind, match[0]


def _bare(name: str) -> str:
    """The name of a rule without its marks and its priority."""
    return name.lstrip("?!").partition(".")[0]


def _text(token: str) -> str:
    if not token.startswith('"'):
        raise ValueError(f"a string must be here, not {token[:40]!r}")
    try:
        return ast.literal_eval(token.removesuffix("i"))
    except (ValueError, SyntaxError):
        raise ValueError(f"the string {token[:40]} is not valid") from None


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n").replace("\\\r", r"\r").replace("\\\t", r"\t")
