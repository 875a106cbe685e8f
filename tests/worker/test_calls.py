"""Calls of coordinators that change a worker."""

import asyncio

import grpc.aio
import pytest

from baton.worker.service_process.backend import Refused
from baton.worker.service_process.grpc_service import done
from tests.stand_in import stand_in


async def test_an_error_after_the_caller_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def change() -> None:
        began.set()
        await goes_on.wait()
        raise Refused("the engine is busy")

    call = asyncio.create_task(done(change(), stand_in(grpc.aio.ServicerContext)))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    changing = asyncio.all_tasks() - {asyncio.current_task()}
    goes_on.set()
    await asyncio.wait(changing)
    assert "a call has failed after its caller left: the engine is busy" in caplog.text
