"""The router: OpenAI's API, and gRPC, in front of prefill and decode workers.

The life of a request here: HTTP body (`front`) or gRPC message (`grpc_face`) → validated (`api`) → let in
(`intake`) → chat template and tokenizer, once (`jobs`) →
admitted (`admission`) → one `generation` for each choice: a prefill and a decode worker are chosen (`policy`,
`pool`) and asked at the same time over their streams (`connection`) → each output index is emitted once
(`emit`), from whichever worker brings it first, through failures of either → text and stop strings
(`detokenizer`, `choice`) → the answer (`serving`), written by the face it came to (`http_answer`, `answers`).
"""

from router.config import RouterConfig
from router.keys import api_keys


def main(config: RouterConfig) -> int:
    """Runs the router until SIGTERM (drains) or SIGINT. Raises ValueError for what a user got wrong."""
    if config.admin_port is not None and not config.supervised:
        from router.processes import supervise as run  # without a tokenizer, which its processes have
    else:
        from router.server import main as run

    return run(config)


__all__ = ["RouterConfig", "api_keys", "main"]
