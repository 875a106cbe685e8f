"""A new process from its first import to the first token: `python -m baton.bench.engine.start MODEL`.

Prints the seconds of each part as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

PROMPT_TOKENS = 64


def main() -> None:
    marks = [time.perf_counter()]
    from baton.bench.engine.drive import greedy, prompt
    from baton.engine import EngineConfig, build_engine

    marks.append(time.perf_counter())
    engine = build_engine(EngineConfig(sys.argv[1], dtype="float32"))
    marks.append(time.perf_counter())
    engine.add(greedy(prompt(PROMPT_TOKENS, 0), 1))
    while not engine.step().outputs:
        pass
    marks.append(time.perf_counter())
    imports, load, first_step = (after - before for before, after in pairwise(marks))
    print(json.dumps({"imports": imports, "load": load, "first_step": first_step}))


if __name__ == "__main__":
    main()
