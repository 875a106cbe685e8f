"""How a worker's life can end other than by being told to."""


class StartError(Exception):
    """It never came up because of something the user can change; the message says what."""


class TreeError(Exception):
    """One of its processes died, fell silent or broke a rule: the whole tree ends, the supervisor starts
    the next."""


class EngineError(TreeError):
    """The engine process died or hung: what it was computing may be why."""
