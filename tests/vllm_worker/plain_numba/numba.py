"""In the place of numba, which vLLM's environment for tests lacks: what it would compile runs as Python."""

from collections.abc import Callable
from typing import Any

prange = range


def jit(*called: Any, **_: Any) -> Any:
    """Also without arguments."""

    def same(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    return same(called[0]) if called and callable(called[0]) else same


njit = jit


def get_num_threads() -> int:
    return 1


def set_num_threads(_: int) -> None:
    pass
