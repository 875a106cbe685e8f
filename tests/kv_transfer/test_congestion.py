"""Lanes have Linux's own congestion control on both ends, whatever the machine's is."""

import socket
from contextlib import closing
from typing import Any

import pytest

from baton.kv_transfer.process.__main__ import listen_at
from baton.kv_transfer.process.tcp import connecting, use_cubic
from baton.kv_transfer.wait import wait


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.fixture
def machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket begins with another one than it shall have. Reno is in every kernel."""
    real = socket.socket.__init__

    def made(sock: socket.socket, *args: Any, **named: Any) -> None:
        real(sock, *args, **named)
        if sock.family == socket.AF_INET and "fileno" not in named:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

    monkeypatch.setattr(socket.socket, "__init__", made)


@pytest.mark.usefixtures("machines_own")
def test_both_ends_of_a_lane() -> None:
    with socket.socket() as plain, closing(listen_at(["127.0.0.1"], 0)[0]) as listener:
        assert congestion_control(plain) == b"reno"
        with connecting(listener.getsockname(), None) as near:
            wait([listener.fileno()], None)
            with listener.accept()[0] as far:
                assert [congestion_control(near), congestion_control(far)] == [b"cubic", b"cubic"]


def test_where_it_is_not_to_be_had_the_machines_own_stays() -> None:
    class Without(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise FileNotFoundError(2, "no such congestion control")

    with Without() as sock:
        use_cubic(sock)
