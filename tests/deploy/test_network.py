"""Who may talk to whom, as the NetworkPolicies of an overlay say; all else is denied."""

import pytest

from .conftest import Object, of_kind, pod_templates

pytestmark = pytest.mark.all

CLIENT, MONITORING = "a client", "monitoring"
ROUTER, PREFILL, DECODE = "router", "prefill", "decode"
API_SERVER = "the API server"
OUTSIDE = {CLIENT, API_SERVER, MONITORING}


def matches(selector: Object, labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] in ("Exists", "In")
        if labels.get(expression["key"]) not in expression.get("values", labels.values()):
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


class Network:
    """The policies, and the pods that they are about: a name for each, and its labels."""

    def __init__(self, objects: list[Object], names: dict[str, str]) -> None:
        """`names`: pod → the owner of its template."""
        owners = {pod.owner: pod.labels for pod in pod_templates(objects)}
        self._labels = {name: owners[owner] for name, owner in names.items()}
        self._policies = [policy["spec"] for policy in of_kind(objects, "NetworkPolicy")]

    def allows(self, source: str, target: str, port: int) -> bool:
        return self._half("Egress", source, target, port) and self._half("Ingress", target, source, port)

    def _half(self, direction: str, pod: str, peer: str, port: int) -> bool:
        if pod in OUTSIDE:
            return True  # not ours to restrict
        rules, side = direction.lower(), "to" if direction == "Egress" else "from"
        mine = [p for p in self._policies if matches(p["podSelector"], self._labels[pod])]
        mine = [policy for policy in mine if direction in policy["policyTypes"]]
        assert mine, "default-deny is about every pod"
        return any(
            any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule.get("ports", [{"port": port}]))
            and (side not in rule or any(self._is(peer, selector) for selector in rule[side]))
            for policy in mine
            for rule in policy.get(rules, [])
        )

    def _is(self, peer: str, selector: Object) -> bool:
        if "namespaceSelector" in selector:
            wanted = selector["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            return peer == wanted
        return peer not in OUTSIDE and matches(selector["podSelector"], self._labels[peer])


FLOWS = {
    (CLIENT, ROUTER, 8000),
    (CLIENT, ROUTER, 8001),
    (ROUTER, PREFILL, 7001),
    (ROUTER, DECODE, 7001),
    (DECODE, PREFILL, 7002),
    (PREFILL, DECODE, 7002),
    (PREFILL, PREFILL, 7002),
    (DECODE, DECODE, 7002),
    (ROUTER, API_SERVER, 443),
    (ROUTER, API_SERVER, 6443),
}
SCRAPES = {
    (MONITORING, ROUTER, 8002),
    (MONITORING, PREFILL, 7003),
    (MONITORING, DECODE, 7003),
    (ROUTER, MONITORING, 4317),
    (PREFILL, MONITORING, 4317),
    (DECODE, MONITORING, 4317),
}
PORTS = (443, 4317, 6443, 7001, 7002, 7003, 8000, 8001, 8002)
# A port that is open to every client is open to all, to other pods as well where these may send there.
OPEN = {(source, ROUTER, port) for source in (MONITORING, API_SERVER) for port in (8000, 8001)}
# No selector can name the API server: what may go there may go anywhere at these ports.
ANYWHERE = {(ROUTER, target, port) for target in (CLIENT, MONITORING) for port in (443, 6443)}


@pytest.mark.parametrize("name", ["plain", "rdma", "single-gpu", "tensor-parallel", "vllm", "cpu-demo"])
def test_these_flows_and_no_others(overlays: dict[str, list[Object]], name: str) -> None:
    network = Network(
        overlays[name],
        {role: f"Deployment baton-{role}" for role in (ROUTER, PREFILL, DECODE)},
    )
    everybody = (ROUTER, PREFILL, DECODE, *sorted(OUTSIDE))
    allowed = {
        (source, target, port)
        for source in everybody
        for target in everybody
        for port in PORTS
        if not {source, target} <= OUTSIDE and network.allows(source, target, port)
    }
    expected = FLOWS | OPEN | ANYWHERE
    assert allowed == (expected if name == "cpu-demo" else expected | SCRAPES)


def test_encoders_are_reached_as_other_workers(overlays: dict[str, list[Object]]) -> None:
    names = {role: f"Deployment baton-{role}" for role in (ROUTER, PREFILL, "encode")}
    network = Network(overlays["encoders"], names)
    for source, port in ((ROUTER, 7001), (PREFILL, 7002), (MONITORING, 7003)):
        assert network.allows(source, "encode", port)
    assert not any(network.allows(CLIENT, "encode", port) for port in PORTS)


def test_all_workers_of_a_group_are_reached(overlays: dict[str, list[Object]]) -> None:
    names = {role: f"Deployment baton-{role}" for role in (ROUTER, PREFILL, DECODE)}
    network = Network(overlays["vllm-data-parallel"], names)
    for source, base in ((ROUTER, 7100), (DECODE, 7200), (MONITORING, 7300)):
        reached = [network.allows(source, PREFILL, port) for port in range(base, base + 3)]
        assert reached == [True, True, False], f"two workers, from {base}"


@pytest.mark.parametrize("name", ["store", "store-ha", "rbg"])
def test_only_workers_and_stores_reach_a_store(overlays: dict[str, list[Object]], name: str) -> None:
    owner = "RoleBasedGroup baton " if name == "rbg" else "Deployment baton-"
    names = {role: f"{owner}{role}" for role in (ROUTER, PREFILL, DECODE)}
    stores = {store: f"StatefulSet baton-{store}" for store in ("store", "store-master")}
    network = Network(overlays[name], names | stores)
    for store in stores:
        reach = {peer for peer in (*names, *stores, *OUTSIDE) if network.allows(peer, store, 12345)}
        assert reach == {PREFILL, DECODE, *stores}
        assert not any(
            network.allows(store, peer, 12345) for peer in (*names, *OUTSIDE) if peer not in OUTSIDE
        )


def test_rays_nodes_reach_each_other_and_clients_only_the_router(overlays: dict[str, list[Object]]) -> None:
    nodes = {
        "head": "RayCluster baton head",
        "worker": "RayCluster baton gpu",
        "front": "Deployment baton-front",
    }
    network = Network(overlays["kuberay"], nodes)
    for source in nodes:
        for target in nodes:
            assert network.allows(source, target, 6379)
            assert network.allows(source, target, 34567)
    assert network.allows(CLIENT, "front", 8000)
    assert network.allows(MONITORING, "front", 8002)
    assert network.allows("head", API_SERVER, 443)
    assert network.allows(MONITORING, "worker", 43210), "an actor's metrics, at a port that the system chose"
    assert not network.allows(MONITORING, "worker", 6379)
    for denied in [
        (CLIENT, "front", 6379),
        (CLIENT, "front", 8002),
        (CLIENT, "worker", 8000),
        (CLIENT, "head", 8265),
    ]:
        assert not network.allows(*denied)
    assert not network.allows("worker", API_SERVER, 443)


def test_a_picker_reads_the_load_of_routers_and_nothing_else(overlays: dict[str, list[Object]]) -> None:
    names = {role: f"Deployment baton-{role}" for role in (ROUTER, PREFILL, "picker")}
    network = Network(overlays["gateway"], names)
    ports = (*PORTS, 9002)
    assert {port for port in ports if network.allows("picker", ROUTER, port)} == {8002}
    assert not any(network.allows("picker", PREFILL, port) for port in ports)
    assert {port for port in ports if network.allows(CLIENT, "picker", port)} == {9002}
    assert not any(network.allows(ROUTER, "picker", port) for port in ports)
    assert network.allows("picker", API_SERVER, 443)
