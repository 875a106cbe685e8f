"""Where child processes import from."""

import os
from pathlib import Path

PACKAGES = str(Path(__file__).parents[3])


def python_path() -> dict[str, str]:
    """Variables by which a child imports the packages of this process first, then what PYTHONPATH names here.

    A file such as rpc.py in the working directory hides no package."""
    entries = [PACKAGES, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, entries)), "PYTHONSAFEPATH": "1"}
