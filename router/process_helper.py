"""The processes of a router of several, as its supervisor starts them: `processes` is the other side.

This module is also their helper, which has what all of them share (`baton.processes.forks`).
"""

import logging
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.processes import forks
from baton.processes.children import report

if TYPE_CHECKING:
    from baton.router.config import RouterConfig


def configured(given: bytes, fds: Sequence[int]) -> "RouterConfig":
    """What `processes.process.RouterProcess` gives."""
    config = pickle.loads(given)  # noqa: S301  (the supervisor wrote it)
    ready, control, keys, children = fds
    return replace(config, ready_fd=ready, control_fd=control, keys_fd=keys, forks_fd=children)


def main(control: int) -> None:
    from baton import router

    with router.loading():
        from baton.router import server
        from baton.router.text.tokenizer import ModelTokenizer

    loaded: server.Loaded

    def load(given: bytes) -> str:
        nonlocal loaded
        title, tokenizer, defaults = pickle.loads(given)  # noqa: S301  (the supervisor wrote it)
        with router.loading():
            loaded = ModelTokenizer.restored(tokenizer), defaults
            _ = loaded[0].state, loaded[0].vocabulary_fingerprint  # each process needs them
        return f"{title} processes"

    def run(given: bytes, fds: Sequence[int]) -> int:
        config = configured(given, fds)
        try:
            return server.main(config, loaded)
        except ValueError as error:  # a mistake of the user
            report(config.ready_fd, {"error": str(error)})
        except BaseException:
            logging.getLogger(__name__).exception("process %s", config.process_number)
        return 1

    forks.serve(control, load, run)


if __name__ == "__main__":
    main(int(sys.argv[1]))
