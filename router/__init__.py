"""The router: OpenAI's HTTP API, and gRPC, in front of prefill and decode workers.

Life of a request:

1. `endpoints`: an HTTP body or a gRPC message arrives.
2. `admission`: its API key and the router's limits admit it.
3. `preparation`: it is validated (`api`), rendered by the chat template and tokenized (`text`), in a child
   process if its body is large.
4. `generation`: one for each choice. `policy` chooses a prefill and a decode worker, and `workers` sends both
   their part at the same time. Each output token is emitted once, even when workers fail.
5. `text` and `tools`: tokens become text, stop strings and tool calls.
6. `endpoints`: the response is built and sent.

`processes` runs several processes of one router on one port.
"""

from router.admission.keys import api_keys
from router.config import RouterConfig


def main(config: RouterConfig) -> int:
    """Runs the router until SIGTERM (drains) or SIGINT. Raises ValueError for a mistake of the user."""
    # Imported here, so that `RouterConfig` alone loads no server.
    if config.admin_port is not None and not config.supervised:
        from router.processes.supervise import supervise as run
    else:
        from router.server import main as run

    return run(config)


__all__ = ["RouterConfig", "api_keys", "main"]
