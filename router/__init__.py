"""The router: the HTTP APIs of OpenAI and Anthropic, and gRPC, in front of prefill and decode workers.

1. `endpoints` receives an HTTP body or a gRPC message.
2. `admission` checks the client's key and limits, and accepts or refuses the request.
3. `preparation` validates the body (`api`), applies the chat template and tokenizes (`text`). A child process
   does that for a large body.
4. One `generation` for each choice waits for free capacity. It chooses a prefill and a decode worker
   (`policy`), and sends both their part at the same time (`workers`).
5. The generation emits each output token once, from the worker that sends it first, also if workers fail.
6. Tokens become text, which ends at stop strings and may contain tool calls (`text`, `tools`).
7. `endpoints` builds and sends the response.

`processes` runs several processes of one router on one port. README.md in this folder shows all places where
a request may wait.
"""

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.router.config import RouterConfig


def main(config: "RouterConfig") -> int:
    """Runs the router until SIGTERM (drains) or SIGINT. Raises ValueError for a mistake of the user."""
    # Imported here, so that neither the configuration nor a child process loads a server.
    with loading():
        from baton.router import server

        if config.admin_port is None:
            run = server.main
        else:
            from baton.router.processes.supervise import supervise

            run = partial(supervise, load=server.load, serve=server.main)
    return run(config)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Imports make no garbage, and collections would slow them by a sixth."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
