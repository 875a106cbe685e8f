"""Which addresses a set of EndpointSlices names."""

from typing import Any

import pytest
from kubernetes.aio.client import V1EndpointSlice

from baton.cluster.discovery.kubernetes_discovery import ready_addresses


def slice_of(name: str, *endpoints: dict[str, Any], family: str = "IPv4", **more: Any) -> V1EndpointSlice:
    made = {
        "metadata": {"name": name, "resourceVersion": "7"},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "metrics", "port": 9000}, {"name": "grpc", "port": 7001}],
    }
    return V1EndpointSlice.model_validate(made | more)


def at(*addresses: str, pod: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"addresses": list(addresses)}
    return found | ({"targetRef": {"uid": pod}} if pod else {})


def addresses(*slices: V1EndpointSlice) -> set[str]:
    return set(ready_addresses(slices, "grpc"))


@pytest.mark.parametrize(
    ("conditions", "there"),
    [
        ({"ready": True}, True),
        ({}, True),  # "nil should be interpreted as true"
        ({"ready": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),  # it drains
    ],
)
def test_only_ready_endpoints_count(conditions: dict[str, bool | None], there: bool) -> None:
    assert addresses(slice_of("a", at("10.0.0.1") | {"conditions": conditions})) == (
        {"10.0.0.1:7001"} if there else set()
    )


def test_slices_add_up_and_an_endpoint_in_two_of_them_counts_once() -> None:
    one, two = slice_of("a", at("10.0.0.1"), at("10.0.0.2")), slice_of("b", at("10.0.0.2"), at("10.0.0.3"))
    assert addresses(one, two) == {"10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.3:7001"}


def test_all_workers_of_a_group_in_a_pod_count() -> None:
    ports = [
        {"name": "grpc", "port": 7100},
        {"name": "grpc-1", "port": 7101},
        {"name": "grpc-web", "port": 80},
    ]
    group = slice_of("a", at("10.0.0.1", pod="p"), ports=ports)
    assert addresses(group) == {"10.0.0.1:7100", "10.0.0.1:7101"}


def test_a_pod_of_a_dual_stack_service_counts_once_by_its_ipv4_address() -> None:
    six = slice_of("six", at("fd00::1", pod="p"), at("fd00::2", pod="q"), family="IPv6")
    four = slice_of("four", at("10.0.0.1", pod="p"))
    assert addresses(six, four) == addresses(four, six) == {"10.0.0.1:7001", "[fd00::2]:7001"}


@pytest.mark.parametrize("nothing", [{"endpoints": None}, {"ports": None}, {"ports": [{"name": "grpc"}]}])
def test_omitted_fields_name_no_worker(nothing: dict[str, Any]) -> None:
    assert not addresses(slice_of("a", at("10.0.0.1"), **nothing))


def test_another_port_is_not_taken_for_grpc() -> None:
    assert not addresses(slice_of("a", at("10.0.0.1"), ports=[{"name": "http", "port": 80}]))
