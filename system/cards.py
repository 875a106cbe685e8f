"""Which network card is nearest to a GPU, as the kernel shows it in `/sys`."""

import os
from collections.abc import Collection
from pathlib import Path


def nearest_card(gpu: str, own: str, cards: Collection[str], sys: Path = Path("/sys")) -> str:
    """The card that shares the longest way of bridges with a GPU, else its NUMA node, and is as fast as `own`
    at least. `own`, unless another one is nearer.

    `gpu`: its PCI address, such as 0000:18:00.0. `own`, `cards`: names of interfaces. Where `/sys` shows no
    PCI device, as of a veth of a container, a bond or a VLAN, or where it is missing, the distance is not
    known: such cards are not chosen, and none is in place of such an `own`."""
    at = sys / "bus/pci/devices" / gpu
    devices = {card: sys / "class/net" / card / "device" for card in (own, *cards)}
    known = {card: path for card, path in devices.items() if path.exists()}
    if own not in known or not at.exists():
        return own

    def nearness(card: str) -> tuple[int, bool]:
        shared = len(Path(os.path.commonpath([at.resolve(), known[card].resolve()])).parts)
        return shared, 0 <= _number(at / "numa_node") == _number(known[card] / "numa_node")

    def speed(card: str) -> int:
        return _number(known[card].with_name("speed"))

    fast = [card for card in known if speed(card) >= speed(own)]
    return max(fast, key=nearness)  # of equals the first one, which is `own`


def _number(path: Path) -> int:
    """-1: not known."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # `speed` cannot be read while the link is down
        return -1
