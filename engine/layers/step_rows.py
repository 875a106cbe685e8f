"""Which rows of a step decode."""


class StepRows:
    """The rows [0, decodes) of the tensors of a step belong to requests that decode, the others to prompts.

    The runner sets it before each pass. Some products compute few rows and many rows in different ways. They
    choose the way by it, so that the result of a row does not depend on the other rows of its step."""

    def __init__(self) -> None:
        self.decodes = 0
