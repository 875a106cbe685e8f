"""How a request names its session: the conversation whose turns find each other's KV.

A request that names none is known by how it begins. Pure; routers and endpoint pickers share it.
"""

from collections.abc import Mapping

import msgspec

_CHOSEN = "x-session-id", "x-session-affinity", "x-smg-routing-key"
"""Headers that clients and gateways set for this: opencode the second, and pi for models whose settings have
`sendSessionAffinityHeaders` (pi-ai 0.74). smg passes the third on."""
_AGENTS = "x-claude-code-session-id", "thread-id", "session-id", "session_id"
"""Headers of agents: of Claude Code, of Codex, and of its earlier releases. Subagents share some of them,
so the fields come first."""
_TRACE = "x-correlation-id"
"""aiperf names its conversations so. Gateways may draw one for each request, so it comes last."""


class _User(msgspec.Struct):
    session_id: str = ""


_user = msgspec.json.Decoder(_User).decode


def session_name(headers: Mapping[str, str], field: str | None, user: str | None) -> str | None:
    """Returns the name of a request's session. None: it names none.

    Args:
        headers: of HTTP, or the metadata of gRPC.
        field: `session_id` (as in vLLM), else that of `session_params` (vLLM's router), else
            its `id` (SGLang), else `prompt_cache_key`.
        user: the field `user`, or `claude_session` of a body for /v1/messages.
    """
    chosen, of_agent = (next(filter(None, map(headers.get, names)), None) for names in (_CHOSEN, _AGENTS))
    return chosen or field or of_agent or user or headers.get(_TRACE) or None


def claude_session(user_id: str | None) -> str | None:
    """Returns the session in `metadata.user_id` of a body for /v1/messages. Without one: all of it.

    Claude Code writes a JSON object with `session_id`; earlier `user_…_account_…_session_…`.
    """
    if user_id is None:
        return None
    if user_id.startswith("{"):
        try:
            return _user(user_id).session_id or user_id
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return user_id  # a name of another form
    before, _, session = user_id.rpartition("_session_")
    return session if session and before.startswith("user_") else user_id
