"""KV goes by the card nearest to the GPU, if a worker listens on all addresses."""

import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.cluster import kv_card
from baton.system.cards import nearest_card

GPUS = {"0": ["00000000:18:00.0"], "1": ["0000:98:00.0"]}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two sockets, each with a GPU and a card. The second one also has a card that is down, one that has just
    gone, and one whose address reaches no further than its link. Returns addresses by interface."""
    cards = ("97", "usb0"), ("19", "eth0"), ("99", "eth1"), ("9a", "eth2"), ("9b", "eth3")
    for bus, card in (("18", ""), ("98", ""), *cards):
        device = tmp_path / f"devices/pci0000:{bus[0]}0/0000:{bus}:00.0"
        device.mkdir(parents=True)
        link = tmp_path / (f"class/net/{card}/device" if card else f"bus/pci/devices/0000:{bus}:00.0")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    addresses = {"lo": "127.0.0.1", "usb0": "169.254.3.1"}
    addresses |= {f"eth{number}": f"10.{number}.0.7" for number in range(4)}
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in addresses.items()
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    up = {name: SimpleNamespace(isup=name != "eth2") for name in addresses if name != "eth3"}
    monkeypatch.setattr("psutil.net_if_stats", lambda: up)
    monkeypatch.setattr(kv_card, "numeric_address", lambda _: addresses["own"])
    monkeypatch.setattr(kv_card, "visible_gpus", lambda: [*GPUS])
    monkeypatch.setattr(kv_card, "told_of_gpus", lambda _: GPUS)
    monkeypatch.setattr(kv_card, "nearest_card", partial(nearest_card, sys=tmp_path))
    return addresses


@pytest.mark.parametrize(
    ("device", "own", "near"),
    [
        ("cuda:1", "10.0.0.7", "eth1"),
        ("cuda", "10.1.0.7", "eth0"),
        ("cuda", "10.0.0.7", None),
        ("cuda:1", "10.1.0.7", None),
        ("cpu", "10.1.0.7", None),
        ("cuda:2", "10.1.0.7", None),
        ("cuda", "127.0.0.1", None),
        ("cuda", "192.0.2.1", None),
    ],
)
def test_the_card_for_kv_is_the_nearest_one_that_is_up(
    device: str, own: str, near: str | None, machine: dict[str, str]
) -> None:
    machine["own"] = own
    assert kv_card.card_near(device) == near


def test_a_machine_that_tells_no_place_keeps_its_own_card(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["own"] = "10.0.0.7"
    monkeypatch.setattr(kv_card, "told_of_gpus", lambda _: {})
    assert kv_card.card_near("cuda:1") is None
