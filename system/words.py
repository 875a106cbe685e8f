"""Words that terminals, logs and errors share."""


def counted(number: int, noun: str) -> str:
    """Returns a number and what it counts: "1 worker", "1,200 workers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
