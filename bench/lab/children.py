"""How long a sandboxed child takes to start: until the answer to its first request, which is refused.

    children.helper      with the helper, which starts by exec and imports what children need: once a run
    children.start.pN    while the helper runs: percentile N of the wall time, one start after the other

Other processes add to these times, so compare trees in turns on one machine.
"""

import asyncio
import sys
import time

from baton.bench.lab.driver import Bench, Run
from baton.bench.report import Row
from baton.processes.sandbox.client import Child, ForkServer

HELPER = """
import sys
from baton.processes.sandbox import helper
from baton.router.preparation import grammar_child
helper.fork_children(int(sys.argv[1]), "bench", {"grammars": grammar_child.serve}, 2 << 30)
"""


async def starts(count: int) -> list[float]:
    """ms of so many starts. The first one has the helper, too."""
    server, taken = ForkServer(["-c", HELPER]), list[float]()
    for _ in range(count):
        child, began = Child(server, "grammars", 0), time.perf_counter()
        await child.call([b"{}"])
        taken.append(1e3 * (time.perf_counter() - began))
        await child.end()
    await server.close()
    return taken


def measure(run: Run) -> None:
    count = 20 if run.short else 1000
    run.parameters["starts"] = count
    first, *others = asyncio.run(starts(count + 1))
    others.sort()
    run.add(Row("children.helper", first, "ms"))
    for percent in (50, 99):
        run.add(Row(f"children.start.p{percent}", others[percent * count // 100], "ms"))


BENCH = Bench("children", measure, __doc__)

if __name__ == "__main__":
    sys.exit(BENCH.main())
