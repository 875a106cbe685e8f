"""The network card for KV of a worker that listens on all addresses of its machine."""

import socket
from ipaddress import ip_address

import psutil

from baton.cluster.gpus import told_of_gpus, visible_gpus
from baton.system.addresses import family, numeric_address
from baton.system.cards import nearest_card

_PCI = len("0000:18:00.0")  # the driver writes eight digits of the domain


def card_near(device: str) -> str | None:
    """The interface of the card nearest to `device`, a GPU. None: that with the host's own address is, or
    the distances are not known."""
    kind, _, number = device.partition(":")
    gpus = visible_gpus()[int(number or 0) :] if kind == "cuda" else []
    if not gpus:
        return None
    try:
        address = numeric_address(socket.gethostname())
    except OSError:
        return None  # `WorkerConfig.reachable_host` tells it
    found, is_up = psutil.net_if_addrs(), psutil.net_if_stats()
    own = [name for name, each in found.items() if address in (a.address for a in each)]
    cards = [
        name
        for name, each in found.items()
        if (stats := is_up.get(name)) is not None  # None: the interface has just gone, as of a container
        and stats.isup
        and any(a.family == family(address) and not ip_address(a.address).is_link_local for a in each)
    ]
    if not own or len(cards) < 2 or (told := told_of_gpus("pci.bus_id").get(gpus[0])) is None:
        return None
    near = nearest_card(told[0].lower()[-_PCI:], own[0], cards)
    return None if near == own[0] else near
