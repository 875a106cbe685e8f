"""The router: OpenAI's API, and gRPC, in front of prefill and decode workers.

The life of a request here: HTTP body or gRPC message (`faces`) → let in (`admission`) → validated (`api`),
chat template and tokenizer, once (`text`), all in a child process where the body is large (`preparation`) →
one `generation` for each choice: a prefill and a decode worker are chosen (`policy`) and asked at the same
time over their streams (`workers`) → each output index is emitted once, from whichever worker brings it
first, through failures of either → text, stop strings, tool calls (`text`, `tools`) → the answer, written
by the face it came to.
"""

from router.admission.keys import api_keys
from router.config import RouterConfig


def main(config: RouterConfig) -> int:
    """Runs the router until SIGTERM (drains) or SIGINT. Raises ValueError for what a user got wrong."""
    if config.admin_port is not None and not config.supervised:
        from router.processes.supervise import (
            supervise as run,  # without a tokenizer, which its processes have
        )
    else:
        from router.server import main as run

    return run(config)


__all__ = ["RouterConfig", "api_keys", "main"]
