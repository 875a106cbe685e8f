"""A process of a router of several, as its supervisor starts it: `process.py` is the other side."""

import logging
import os
import pickle
import signal
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from baton.processes.children import die_with_parent, report
from baton.processes.spawn import take_given

if TYPE_CHECKING:
    from baton.router.api.jobs import SamplingDefaults
    from baton.router.config import RouterConfig


class Given(NamedTuple):
    """What it gets, pickled. The descriptors in `config` are inherited."""

    parent_pid: int
    config: "RouterConfig"
    tokenizer: bytes
    """`ModelTokenizer.state`"""
    defaults: "SamplingDefaults"

    @classmethod
    def taken(cls) -> Self:
        return cls(*pickle.loads(take_given()))  # noqa: S301  (the parent wrote it)


def main() -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the supervisor sends commands
        signal.signal(number, signal.SIG_IGN)
    given = Given.taken()
    config, code = given.config, 1
    try:
        die_with_parent(given.parent_pid)
        from baton.router import serve

        code = serve(config, given.tokenizer, given.defaults)
    except ValueError as error:  # a mistake of the user
        report(config.ready_fd, {"error": str(error)})
    except BaseException:
        logging.getLogger(__name__).exception("process %s", config.process_number)
    os._exit(code)


if __name__ == "__main__":
    main()
