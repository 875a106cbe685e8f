"""One process of a host gets the reports of the workers for all: of their status, and of cached chunks."""

import asyncio
import logging
import time

from baton.router.workers.roster import Roster
from baton.router.workers.worker import Worker
from baton.rpc import LONGEST_REPORT
from baton.rpc import worker_pb2 as pb

log = logging.getLogger(__name__)

WRITER_SECONDS = 1.0
"""How often a process looks whether the one that gets the reports has ended."""
READ_SECONDS = 0.02
"""How often a process reads what that one passes on. Workers report every 50 ms, or less often."""
SILENT_SECONDS = 3 * LONGEST_REPORT
"""After so long without a report a process asks the worker itself: the other one may not reach it."""


async def share(roster: Roster, process: int) -> None:
    """Reads what another process passes on. When that one has ended, this process may get the reports."""
    if roster.writes:  # it is alone
        return
    asking: set[asyncio.Task[None]] = set()
    while not roster.loads.index.table.may_write():
        until = time.monotonic() + WRITER_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(READ_SECONDS)
            try:
                _read(roster)
            except Exception:  # a task that ends here would never read again
                log.exception("a defect in the router: a report is lost")
        for worker in roster.by_row.values():
            if worker.reported_at < until - WRITER_SECONDS - SILENT_SECONDS:
                asking.add(task := asyncio.create_task(_ask(roster, worker)))
                task.add_done_callback(asking.discard)
    roster.writes = True
    log.info("process %d gets the reports of the workers", process)
    for worker in roster.by_row.values():
        worker.send(pb.RouterMessage(cache_resync=pb.CacheResync()))


def _read(roster: Roster) -> None:
    for row, incarnation, status in roster.loads.index.table.rows.reports():
        worker = roster.by_row.get(row)
        if worker is not None and worker.description.incarnation == incarnation:
            roster.reported(worker, status)


async def _ask(roster: Roster, worker: Worker) -> None:
    await roster.turn()  # many may be silent
    if (status := await worker.ask()) is not None and worker.attached:
        roster.reported(worker, status)
