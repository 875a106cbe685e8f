"""Which rows of a step decode."""


class StepRows:
    """The rows [0, decodes) of the tensors of a step belong to requests that decode, the others to prompts.

    The runner sets it before each pass. Products that compute few rows and many rows in different ways choose
    by it, so that a row's result does not depend on the other rows of its step."""

    def __init__(self) -> None:
        self.decodes = 0
