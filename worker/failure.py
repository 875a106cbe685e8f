"""The errors that end a worker."""


class StartError(Exception):
    """The worker cannot start because of a mistake that the user can correct. The message names it."""


class TreeError(Exception):
    """A process of the worker died, hung or sent a wrong message.

    The whole tree ends, and the supervisor starts the next incarnation.
    """


class EngineError(TreeError):
    """The engine process died or hung. An attempt of its last step may be the cause."""
