"""What is new in the requests of a client, and what of its turns was cached."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from baton.kv_names import CHUNK_TOKENS
from baton.router.api.anthropic.body import MessagesBody
from baton.router.api.bodies import ChatBody
from baton.router.api.openai_responses.body import ResponsesBody
from baton.router.api.sessions import claude_session, session_name
from tests.clients.catalog import CHAT, MESSAGES, NOTE, RESPONSES, TASK, Client
from tests.clients.installed import Run
from tests.clients.model import FINAL, SAID, Call, Seen, thought, turn
from tests.clients.recorder import Exchange
from tests.clients.shape import paths, recorded, whole

RECORDED = Path(__file__).with_name("recorded")
LEAST_CACHED = 0.97
"""Of the longest common prefix with the turn before, in whole chunks."""
BODIES = {CHAT: ChatBody, RESPONSES: ResponsesBody, MESSAGES: MessagesBody}


class Turn(NamedTuple):
    """What the router cached of a turn."""

    tokens: int
    common: int
    """Tokens of the longest common prefix with the turn before, in whole chunks."""
    cached: int
    extends: bool
    """The prompt begins with the whole turn before, its answer included."""

    @property
    def share(self) -> float:
        return self.cached / self.common if self.common else 1.0


def turns(calls: Sequence[Call], seen: Sequence[Seen]) -> list[Turn]:
    """The turns of the task after the first one."""
    own = [each for each in seen if turn(calls, each.text) is not None]
    found = []
    for before, after in pairwise(own):
        differs = (i for i, (a, b) in enumerate(zip(before.ids, after.ids, strict=False)) if a != b)
        common = next(differs, min(len(before.ids), len(after.ids)))
        whole = before.ids + before.output
        extends = after.ids[: len(whole)] == whole
        found.append(Turn(len(after.ids), common // CHUNK_TOKENS * CHUNK_TOKENS, after.cached, extends))
    return found


def posts(exchanges: Sequence[Exchange]) -> list[Exchange]:
    return [each for each in exchanges if each.method == "POST" and isinstance(each.body, dict)]


def unknown(exchanges: Sequence[Exchange]) -> set[str]:
    """Fields of bodies that the router does not read."""
    found: set[str] = set()
    for exchange in posts(exchanges):
        if (body := BODIES.get(exchange.path.partition("?")[0])) is not None:
            found |= exchange.body.keys() - body.model_json_schema()["properties"].keys()
    return found


def recording(name: str) -> Path | None:
    """The file of a client: NAME-VERSION.json."""
    files = [file for file in RECORDED.iterdir() if re.fullmatch(re.escape(name) + r"-\d.*\.json", file.name)]
    return max(files, default=None)


def changes(name: str, exchanges: Sequence[Exchange]) -> list[str]:
    """What the requests have that their recording has not, and the other way round."""
    if (file := recording(name)) is None:
        return ["no recording"]
    before = json.loads(file.read_text())
    old = set[str]().union(*(paths(whole(before, number)) for number in range(len(before))))
    new = set[str]().union(*(paths(each.body) for each in posts(exchanges)))
    headers = {name for each in posts(exchanges) for name in each.headers}
    known = {name for each in before for name in each["headers"]}
    return [
        *(f"+ {path}" for path in sorted(new - old)),
        *(f"- {path}" for path in sorted(old - new)),
        *(f"- header {name}" for name in sorted(known - headers)),
    ]


def report(name: str, client: Client, run: Run) -> list[str]:
    """Prints what a client did. Returns what is wrong."""
    print(f"== {name} {run.version}: {client.endpoint}")
    for exchange in run.exchanges:
        print(f"{exchange.method} {exchange.path} {exchange.status}")
    wrong = [
        f"{name} {run.version}: {each.method} {each.path} {each.status} {each.answer[:300]}"
        for each in run.exchanges
        if not 200 <= each.status < 400
    ]
    if not run.done:
        wrong.append(f"{name} {run.version}: exit code {run.exit_code}, {run.output[-1000:]}")
    found = turns(client.calls, run.seen)
    if len(found) != len(client.calls):
        wrong.append(f"{name} {run.version}: {len(found) + 1} turns")
    for each in found:
        how = "extends the turn before" if each.extends else "does not have the answer before as it was"
        print(f"{each.tokens} tokens, {each.cached} of {each.common} cached ({each.share:.3f}), {how}")
        if each.share < LEAST_CACHED:
            wrong.append(f"{name} {run.version}: {each.cached} of {each.common} cached")
    print("session:", *(session_names(run.exchanges) or ["the first chunk of the prompt"]))
    print("unread fields:", *sorted(unknown(run.exchanges)))
    print(*changes(name, run.exchanges), sep="\n")
    return wrong


def session_names(exchanges: Sequence[Exchange]) -> list[str]:
    """The headers and fields with the name by which the router knows a request's session."""
    named = posts(exchanges)[-1:]
    for each in named:
        body, user = each.body, each.body.get("user")
        if each.path.startswith(MESSAGES):
            user = claude_session(body.get("metadata", {}).get("user_id"))
        field = body.get("session_id") or body.get("prompt_cache_key")
        if (name := session_name(each.headers, field, user)) is not None:
            headers = [f"header {header}" for header, value in each.headers.items() if value == name]
            return headers + [member for member, value in body.items() if name in strings(value)]
    return []


def strings(value: Any) -> list[str]:
    """The texts in a value."""
    if isinstance(value, dict):
        return [text for inner in value.values() for text in strings(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in strings(inner)]
    return [value] if isinstance(value, str) else []


def record(name: str, client: Client, run: Run, task: Path) -> Path:
    """Writes the recording of a client anew."""
    for file in RECORDED.glob(f"{name}-[0-9]*.json"):
        file.unlink()
    said = [SAID, FINAL, NOTE, TASK, *(thought(number) for number in range(len(client.calls)))]
    said += [text for call in client.calls for text in strings(call.arguments)]
    places = {str(task / "work"): "/home/user/work", str(task / "home"): "/home/user", str(task): "/home"}
    requests = recorded(posts(run.exchanges), said, places)
    file = RECORDED / f"{name}-{run.version}.json"
    file.write_text(json.dumps(requests, indent=1, ensure_ascii=False) + "\n")
    return file
