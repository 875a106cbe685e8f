"""The card nearest to a GPU, in a tree like that of a server with two sockets."""

from pathlib import Path

import pytest

from baton.system.cards import nearest_card

GPU = "0000:18:00.0"
_DEVICES = {
    GPU: "pci0000:17/0000:17:01.0/0000:18:00.0",
    "behind-the-switch": "pci0000:17/0000:17:01.0/0000:19:00.0",
    "same-root": "pci0000:17/0000:17:05.0/0000:30:00.0",
    "same-socket": "pci0000:40/0000:40:01.0/0000:41:00.0",
    "other-socket": "pci0000:97/0000:97:01.0/0000:98:00.0",
    "of-a-guest": "pci0000:17/0000:17:02.0/virtio2",
}
_VIRTUAL = "veth", "bond0"


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    for name, place in _DEVICES.items():
        device = tmp_path / "devices" / place
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{int(name == 'other-socket')}\n")
        link = tmp_path / ("bus/pci/devices" if name == GPU else f"class/net/{name}") / name
        if name == GPU:
            link.parent.mkdir(parents=True)
            link.symlink_to(device)
        else:
            card = device / "net" / name
            card.mkdir(parents=True)
            (card / "speed").write_text("100000\n")
            (card / "device").symlink_to(device)
            (tmp_path / "class/net").mkdir(parents=True, exist_ok=True)
            (tmp_path / "class/net" / name).symlink_to(card)
    for name in _VIRTUAL:
        (tmp_path / "class/net" / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "cards", "near"),
    [
        ("other-socket", ["same-socket", "same-root", "behind-the-switch"], "behind-the-switch"),
        ("other-socket", ["same-socket", "same-root"], "same-root"),
        ("other-socket", ["same-socket"], "same-socket"),
        ("other-socket", ["veth", "bond0", "missing"], "other-socket"),
        ("same-root", ["of-a-guest", "same-socket"], "same-root"),
        ("veth", ["behind-the-switch"], "veth"),  # of a container
        ("bond0", ["behind-the-switch"], "bond0"),
    ],
)
def test_the_nearest_card_is_known_by_its_bridges_and_its_socket(
    own: str, cards: list[str], near: str, sys: Path
) -> None:
    assert nearest_card(GPU, own, [own, *cards], sys) == near


@pytest.mark.parametrize(
    ("text", "near"), [("1000", "other-socket"), ("200000", "same-root"), ("", "other-socket")]
)
def test_a_nearer_card_is_not_chosen_if_it_is_slower(text: str, near: str, sys: Path) -> None:
    (sys / "class/net/same-root/speed").write_text(text)
    assert nearest_card(GPU, "other-socket", ["same-root"], sys) == near


@pytest.mark.parametrize("gpu", ["0000:99:00.0", ""])
def test_a_gpu_without_a_place_has_no_nearest_card(gpu: str, sys: Path, tmp_path: Path) -> None:
    assert nearest_card(gpu, "other-socket", ["same-root"], sys) == "other-socket"
    assert nearest_card(GPU, "eth0", ["eth1"], tmp_path / "no-sys") == "eth0"
