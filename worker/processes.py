"""The errors of child processes that end a service process, and how long a start may be silent."""

import asyncio
from typing import Any

START_SILENCE = 600.0
"""Seconds allowed between two ticks during start-up, which may download, compile or capture graphs."""


class StartError(Exception):
    """The worker cannot start because of a mistake that the user can correct. The message names it."""


class StandbyError(StartError):
    """A standby cannot start beside the engine process that serves. It can when that one has ended."""


class TreeError(Exception):
    """A process of the worker died, hung or sent a wrong message.

    The whole tree ends, and the supervisor starts the next incarnation.
    """


class EngineError(TreeError):
    """The engine process died or hung. An attempt of its last step may be the cause."""


class EngineRestart(EngineError):
    """The engine process runs well, and another one shall take its place."""


def dismiss(answer: asyncio.Future[Any]) -> None:
    """Nothing waits for this answer any more. An error that it may have is no error of the program."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()
