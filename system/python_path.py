"""What children that run Python import, and from where."""

import os
from pathlib import Path

PACKAGES = str(Path(__file__).parents[2])
"""The directory that has the package `baton` of this process."""


def python_path() -> dict[str, str]:
    """Variables for each child that runs Python, and for its own children.

    It imports the packages of this process first, then what PYTHONPATH names. A file in the working
    directory, such as json.py, hides no module.
    """
    entries = [PACKAGES, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, entries)), "PYTHONSAFEPATH": "1"}
