"""The chart refuses flags, settings and values that nothing has, by name, when it renders."""

import json
from typing import Any

import helm_python
import pytest

from .test_helm import CHART, VALUES, rendered

pytestmark = pytest.mark.all

GATEWAY = {"gateway": {"enabled": True}}
RAY = {"workload": "RayCluster"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # Flags, with those of the role that are most like them.
        ({"prefill": {"args": ["--max-num-seq=8"]}}, "prefill.args: baton prefill has no --max-num-seq; "
            "did you mean --max-num-seqs?"),
        ({"decode": {"args": ["--kv-conector=nixl"]}}, "no --kv-conector; did you mean --kv-connector?"),
        ({"decode": {"args": ["--gpu-memory-utilisation=0.9"]}}, "did you mean --gpu-memory-utilization?"),
        ({"router": {"args": ["--advanced.routing-polcy=sticky"]}}, "no --advanced.routing-polcy; "
            "did you mean --advanced.routing-policy?"),
        ({"router": {"args": ["--advanced.no-overflows"]}}, "did you mean --advanced.no-overflow?"),
        ({"encode": {"replicas": 1, "args": ["--max-num-seq=2"]}}, "encode has no --max-num-seq; "
            "did you mean --max-num-seqs?"),
        (GATEWAY | {"picker": {"args": ["--drain-time=5"]}}, "picker.args: baton picker has no --drain-time; "
            "did you mean --drain-timeout?"),
        # Settings.
        ({"settings": {"BATON_MAX_NUM_SEQ": "8"}}, "BATON_MAX_NUM_SEQ; did you mean BATON_MAX_NUM_SEQS?"),
        ({"settings": {"BATON_MAX_MODEL_LENGTH": "8"}}, "did you mean BATON_MAX_MODEL_LEN?"),
        ({"settings": {"BATON_REQUEST_TIMOUT": "8"}}, "did you mean BATON_REQUEST_TIMEOUT?"),
        (RAY | {"settings": {"BATON_PLACEMNT": "pack"}}, "baton serve has no BATON_PLACEMNT; did you mean "
            "BATON_PLACEMENT?"),
        ({"prefill": {"env": [{"name": "BATON_DTYP", "value": "float32"}]}}, "prefill.env: baton prefill has "
            "no BATON_DTYP; did you mean BATON_DTYPE?"),
        # Choices.
        ({"decode": {"args": ["--kv-connector=nixel"]}}, 'decode.args: --kv-connector: "nixel" is none of '
            "auto, tcp, nixl"),
        ({"settings": {"BATON_LOG_FORMAT": "jsn"}}, 'BATON_LOG_FORMAT: "jsn" is none of text, json'),
        ({"router": {"env": [{"name": "BATON_LOG_LEVEL", "value": "warn"}]}}, 'router.env: BATON_LOG_LEVEL: '
            '"warn" is none of debug, info, warning, error'),
        # Values.
        ({"ingres": {"enabled": True}}, "'ingres' not allowed"),
        ({"router": {"replica": 3}}, "'replica' not allowed"),
        ({"weights": {"storageClass": "fast"}}, "'storageClass' not allowed"),
        ({"ingress": {"hosts": [{"name": "a.example"}]}}, "'name' not allowed"),
        ({"router": {"extraVolumeMount": []}}, "'extraVolumeMount' not allowed"),
        ({"service": {"type": "Loadbalancer"}}, "/service/type"),
    ],
)  # fmt: skip
def test_a_misspelling_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # Of vLLM, of another role, and like nothing.
        ({"prefill": {"args": ["--swap-space=4"]}}, "has no --swap-space: A request without free"),
        ({"prefill": {"args": ["--kv-lanes=2"]}}, "has no --kv-lanes: Give --advanced.kv-lanes."),
        ({"settings": {"BATON_TTIT_TARGET": "9"}}, "has no BATON_TTIT_TARGET: Give --itl-target"),
        ({"settings": {"BATON_SWAP_SPACE": "4"}}, "has no BATON_SWAP_SPACE: A request without free"),
        ({"prefill": {"args": ["--max-wait=5"]}}, "prefill.args: baton prefill has no --max-wait"),
        ({"router": {"args": ["--zzz=5"]}}, "baton router has no --zzz\n"),
        ({"settings": {"BATON_ROUTER_METRICS_PORT": "8002"}}, "prefill, decode, router has no "),
        # A variable for a second name of a flag is none.
        ({"settings": {"BATON_NUM_GPU_BLOCKS_OVERRIDE": "4"}}, "has no BATON_NUM_GPU_BLOCKS_OVERRIDE"),
        # In another form than the flag has.
        ({"router": {"args": ["--advanced.no-overflow=true"]}}, "--advanced.no-overflow takes no value"),
        ({"decode": {"args": ["--max-num-seqs"]}}, "decode.args: --max-num-seqs needs a value"),
        # Beside what the chart sets.
        ({"router": {"args": ["--port=9000"]}}, "router.args: --port is given twice"),
        ({"prefill": {"args": 2 * ["--advanced.kv-lanes=2"]}}, "--advanced.kv-lanes is given twice"),
        ({"settings": {"BATON_PORT": "9000"}}, "settings: BATON_PORT has no effect on "),
    ],
)  # fmt: skip
def test_a_flag_without_an_effect_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(values)
    assert message in f"{refused.value}\n"


def test_each_flag_of_a_role_renders() -> None:
    """Also a flag that may come again, and one with an opposite."""
    options = json.loads((CHART / "files" / "options.json").read_text())
    own = {"--host", "--port", "--kv-port", "--metrics-port", "--cluster-secret-file", "--drain-timeout"}
    of = options["commands"]["prefill"]
    kinds = of["flags"] | of["aliases"]
    args = [flag for flag, kind in kinds.items() if kind == "switch"]
    for flag, kind in kinds.items():
        if kind == "value" and flag not in own:
            args.append(f"{flag}={of['choices'].get(flag, '1').split()[0]}")
    args += ["--served-model-name=a", "--served-model-name=b"]
    objects = rendered({"prefill": {"args": args}, "settings": {"BATON_GPU_MEMORY_UTILIZATION": "0.5"}})
    [container] = objects["Deployment", "baton-prefill"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-len(args) :] == args


def test_other_variables_are_not_of_baton() -> None:
    values = {
        "settings": VALUES["settings"] | {"NCCL_DEBUG": "INFO", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}
    }
    assert rendered(values)["ConfigMap", "baton-settings"]["data"]["NCCL_DEBUG"] == "INFO"
