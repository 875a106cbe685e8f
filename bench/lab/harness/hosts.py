"""Hosts on one machine: network namespaces with addresses and rates of their own. Needs root, `ip` and `tc`.

    this machine ───┐
    host 0 ── veth ─┤ bridge, in a namespace of its own
    host 1 ── veth ─┘

A host has one link to the bridge or several, its cards, with a token bucket (TBF) for each direction.
"""

import contextlib
import ctypes
import functools
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from baton.bench.lab.driver import CannotMeasure

CLONE_NEWNET = 0x40000000  # linux/sched.h; the os module has it from Python 3.12 on


class NoHosts(CannotMeasure):
    """This machine cannot make hosts. The text says what it lacks."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"`{' '.join(command)}` fails: {done.stderr.strip()}")


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Host:
    """One of `Hosts`.

    Attributes:
        address: of its first card: IPv4, or IPv6 if these hosts have no other.
        addresses: of all of its cards, likewise.
        address6: IPv6, of the first one.
    """

    def __init__(self, network: "Hosts", number: int) -> None:
        self.address6 = f"{network.prefix6}{number + 1}"
        self.addresses = [f"{prefix}.{number + 1}" for prefix in network.prefixes] or [self.address6]
        self.address = self.addresses[0]
        self._space, self._bridge = f"{network.name}h{number}", network.name
        self._cards = [(f"eth{card}", f"h{number}c{card}") for card in range(len(self.addresses))]
        for (device, port), address in zip(self._cards, self.addresses, strict=True):
            network.link(port, self._space, device, address)
        with self.inside():  # else one card answers for the addresses of all
            for rule, value in (("arp_ignore", 1), ("arp_announce", 2)):
                Path(f"/proc/sys/net/ipv4/conf/all/{rule}").write_text(f"{value}\n")
        if self.address != self.address6:
            _run("ip", "-n", self._space, "address", "add", f"{self.address6}/64", "dev", "eth0", "nodad")

    def enter(self) -> None:
        """Moves the calling thread, and the processes that it starts from now on, to this host. Other threads
        stay where they are."""
        with open(f"/run/netns/{self._space}") as space:
            _set_network(space.fileno())

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is there meanwhile, and what it starts."""
        with open("/proc/thread-self/ns/net") as before:
            self.enter()
            try:
                yield
            finally:
                _set_network(before.fileno())

    def limit(self, *, sends: float = 0.0, receives: float = 0.0, card: int | None = None) -> None:
        """Bytes/s of a card, or of each. 0: as many as the machine carries."""
        for device, port in self._cards if card is None else [self._cards[card]]:
            for space, end, rate in ((self._space, device, sends), (self._bridge, port, receives)):
                _run("tc", "-n", space, "qdisc", "replace", "dev", end, "root", "pfifo", "limit", "1000")
                if rate:
                    bucket = max(256 << 10, int(rate / 250))  # what a clock of 250 Hz lets through at once
                    _run(
                        "tc", "-n", space, "qdisc", "replace", "dev", end, "root", "tbf",
                        "rate", f"{8 * rate:.0f}bit", "burst", str(bucket), "latency", "50ms",
                    )  # fmt: skip

    def cut(self, card: int = 0) -> None:
        """Nothing passes the link of a card, in either direction, and neither end is told."""
        _run("ip", "-n", self._bridge, "link", "set", self._cards[card][1], "nomaster")

    def mend(self, card: int = 0) -> None:
        _run("ip", "-n", self._bridge, "link", "set", self._cards[card][1], "master", "bridge")

    def lose(self, other: "Host") -> None:
        """Nothing that it sends to the first card of the other host arrives, and neither is told."""
        nobody = "02:00:00:00:00:01"
        _run("ip", "-n", self._space, "neigh", "replace", other.address, "lladdr", nobody, "dev", "eth0")

    def detour(self, other: "Host", card: int) -> None:
        """What it sends to the first card of the other host leaves by this card. Answers come as before."""
        _run("ip", "-n", self._space, "route", "replace", other.address, "dev", self._cards[card][0])

    def sent(self, card: int) -> int:
        """Bytes that left by this card."""
        with self.inside():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{self._cards[card][0]}:")

    def find(self, other: "Host") -> None:
        """Undoes `lose`."""
        _run("ip", "-n", self._space, "neigh", "flush", "to", other.address, "dev", "eth0")

    def lose_large(self, other: "Host", mtu: int) -> None:
        """Packets to the other host with more bytes vanish on the way, and it is not told."""
        for (device, _), (_, port) in zip(self._cards, other._cards, strict=True):
            # Longer ones would pass, since a bridge looks at what the device can cut.
            _run("ip", "-n", self._space, "link", "set", device, "gso_max_segs", "1")
            _run("ip", "-n", self._bridge, "link", "set", port, "mtu", str(mtu))


class Hosts:
    """Use as a context manager: entering makes so many hosts, leaving removes them.

    Processes there must have ended by then. Attributes:
        hosts: as made.
    """

    def __init__(self, count: int, cards: int = 1, *, only_ipv6: bool = False) -> None:
        """`cards`: of each host, each in a network of its own. `only_ipv6`: no address of IPv4, and one card.
        Raises NoHosts."""
        if os.geteuid():
            raise NoHosts("hosts on one machine need root: this user may make no network namespaces")
        if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
            raise NoHosts(f"hosts on one machine need {' and '.join(missing)} (iproute2)")
        self.name = f"bt{random.getrandbits(32):08x}"
        # RFC 2544 keeps 198.18.0.0/15 for measurements within a laboratory.
        first = random.randrange(256 - cards)
        some = range(0 if only_ipv6 else cards)
        self.prefixes = [f"198.{18 + random.getrandbits(1)}.{first + card}" for card in some]
        self.prefix6 = f"fd00:{random.getrandbits(16):x}:{random.getrandbits(16):x}::"
        self.hosts: list[Host] = []
        self._count = count
        self._spaces = [self.name, *(f"{self.name}h{number}" for number in range(count))]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as unless_it_is_up:
            unless_it_is_up.callback(self._remove)
            for space in self._spaces:
                _run("ip", "netns", "add", space)
                _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", self.name, "link", "add", "bridge", "up", "type", "bridge")
            own6 = f"{self.prefix6}fe"
            for card, address in enumerate([f"{prefix}.254" for prefix in self.prefixes] or [own6]):
                self.link(f"out{card}", "", f"{self.name}{card}", address)
            if self.prefixes:
                _run("ip", "address", "add", f"{own6}/64", "dev", f"{self.name}0", "nodad")
            self.hosts = [Host(self, number) for number in range(self._count)]
            unless_it_is_up.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def link(self, port: str, space: str, device: str, address: str) -> None:
        """Adds a link from the bridge to a namespace. `space`: empty: that of this machine."""
        there = functools.partial(_run, "ip", *(["-n", space] if space else []))
        peer = ["netns", space] if space else ["netns", str(os.getpid())]
        ours = functools.partial(_run, "ip", "-n", self.name, "link")
        ours("add", port, "type", "veth", "peer", "name", device, *peer)
        ours("set", port, "master", "bridge", "up")
        there(
            "address",
            "add",
            *([f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]),
            "dev",
            device,
        )
        # A veth carries 64 KiB at once, so a slow link would stand still and then bring a whole frame.
        there("link", "set", device, "gso_max_size", "16384", "up")

    def _remove(self) -> None:
        """Links go with their namespaces."""
        for space in self._spaces:
            with contextlib.suppress(NoHosts):  # it was not made
                _run("ip", "netns", "delete", space)
