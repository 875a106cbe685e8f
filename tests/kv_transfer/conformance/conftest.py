"""What every transport must do, in one suite. A test here knows sender, receiver and pools, and no socket.

`transport` is a parameter of every test. A transport is a `Kind`: the settings of its workers, and a way to
damage one slice between gather and scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.bad_network import BadNetwork
from tests.kv_transfer.conftest import Decode, Pair, Prefill


@contextmanager
def _bent_on_a_lane(prefill: Prefill) -> Iterator[str]:
    with closing(BadNetwork(prefill.port, fault="corrupt", hits=1)) as network:
        yield network.address
        assert network.suffered == 1


@dataclass(frozen=True)
class Kind:
    name: str
    bent: Callable[[Prefill], AbstractContextManager[str]]
    """Within it, one byte of the next slice that is fetched from the address changes on its way."""
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


TCP = Kind("tcp", _bent_on_a_lane)
TCP_WITH_MOVERS = Kind("tcp with movers", _bent_on_a_lane, {"lane_processes": 3})
KINDS = [TCP]


@pytest.fixture(scope="package", params=KINDS, ids=str)
def transport(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def make_prefill(workers: list[Any], transport: Kind) -> Callable[..., Prefill]:
    def make(**config: Any) -> Prefill:
        workers.append(Prefill(**transport.settings, **config))
        return workers[-1]

    return make


@pytest.fixture
def make_decode(workers: list[Any], transport: Kind) -> Callable[..., Decode]:
    def make(**config: Any) -> Decode:
        workers.append(Decode(**transport.settings, **config))
        return workers[-1]

    return make


@pytest.fixture(scope="package")
def _shared(transport: Kind) -> Iterator[Pair]:
    prefill = Prefill(block_size=32, **transport.settings)
    with closing(prefill), closing(Decode(**transport.settings)) as decode:
        yield Pair(prefill, decode)


@pytest.fixture
def pair(_shared: Pair) -> Iterator[Pair]:
    """Workers that tests share, with blocks of 32 and of 16 positions. Their pools are whole after each."""
    yield _shared
    for decode_id in list(_shared.decode.reserved):
        _shared.decode.release(decode_id)
    _shared.assert_whole()
    assert len(_shared.decode.free) == 64
    assert not any(layer.any() for layer in _shared.decode.ranks.tensors), "a late byte landed"
