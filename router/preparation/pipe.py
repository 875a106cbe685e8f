"""What children of a router reply: the other side is `child_pool.read_answer`."""

import sys
from collections.abc import Callable
from functools import partial

import msgspec

from baton.processes.sandbox import helper
from baton.router.child_pool import Answer, Defect, Error
from baton.router.errors import ApiError
from baton.system.logs import stack_without_text


def serve(answer: Callable[[bytes], bytes], cpu_seconds: float) -> None:
    """As `helper.serve`. `answer` gives MessagePack, or raises an ApiError."""
    helper.serve(partial(answered, answer), cpu_seconds)


def answered(answer: Callable[[bytes], bytes], request: bytes) -> bytes:
    """Returns the reply that `child_pool.read_answer` reads: the answer, or the error that was raised."""
    try:
        return msgspec.msgpack.encode(Answer(msgspec.Raw(answer(request))))
    except ApiError as error:
        message = error.message.encode(errors="backslashreplace").decode()
        return msgspec.msgpack.encode(Error(type(error).__name__, message, error.param))
    except MemoryError:
        sys.exit(1)  # the memory limit: the router refuses the request
    except Exception as error:  # noqa: BLE001  (a defect: the router logs it)
        return msgspec.msgpack.encode(Defect("\n".join(stack_without_text(error))))
