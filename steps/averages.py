"""What work has cost lately."""


class Average:
    """The ratio of two sums in which older samples weigh less: mean seconds of a step, tokens in a second.

    Attributes:
        value: the ratio; 0 before the first sample.
    """

    __slots__ = ("_amount", "_decay", "_per", "value")

    def __init__(self, decay: float = 0.9) -> None:
        """`decay`: factor on the weight of all samples before, for one step."""
        self.value = self._amount = self._per = 0.0
        self._decay = decay

    def add(self, amount: float, per: float = 1.0, *, steps: float = 1.0) -> None:
        """Adds a sample of `amount` in `per`, both at least 0, after so many steps since the last one."""
        kept = self._decay**steps
        self._amount = kept * self._amount + amount
        self._per = kept * self._per + per
        self.value = self._amount / self._per if self._per else 0.0

    def scale(self, factor: float) -> None:
        """Multiplies the value. Later samples count as much as without this call."""
        self._amount *= factor
        self.value *= factor
