"""Parts of a set of tests: `--shard 2/6` runs the second of six, which take about as long as each other.

Tests that share costly fixtures stay together, so a module is never divided, but where `MINUTES` says so.
"""

import argparse
import json
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import date
from operator import itemgetter

import pytest

MINUTES: dict[str, float] = {
    "tests/bench/test_smoke.py": 12,
    "tests/clients/test_clients.py": 8,
    "tests/decode_worker/": 4,
    "tests/decode_worker/test_fuzz.py": 8,
    "tests/engine/test_kernels.py": 3,
    "tests/engine/test_quality.py": 3,
    "tests/engine/test_random_lives.py": 2,
    "tests/engine/test_unequal_groups.py": 4,
    "tests/kv_transfer/conformance/": 3,
    "tests/kv_transfer/test_bad_network.py::test_every_fault_of_lanes[long-test_every": 5,
    "tests/kv_transfer/test_bad_network.py::test_every_fault_of_lanes[long-test_what": 10,
    "tests/kv_transfer/test_fuzz.py": 4,
    "tests/kv_transfer/test_connection.py": 2,
    "tests/kv_transfer/test_soak.py": 3,
    "tests/router/test_composed_grammars.py": 2.5,
    "tests/router/test_fuzz.py": 2.5,
    "tests/router/test_schema_fuzz.py": 3,
    "tests/system/test_attack.py": 11,
    "tests/system/test_attack.py::test_known_streams_go_on": 12,
    "tests/system/test_chaos.py::test_no_stream_notices[hundred kills, another order]": 16,
    "tests/system/test_chaos.py::test_no_stream_notices[hundred kills]": 16,
    "tests/system/test_chats.py": 6,
    "tests/system/test_families.py": 5,
    "tests/system/test_faults.py": 10,
    "tests/system/test_raylets.py": 8,
    "tests/system/test_split.py": 12,
    "tests/vllm_worker/test_attached_vllm.py": 9,
    "tests/vllm_worker/test_bench.py": 4,
    "tests/vllm_worker/test_latents.py": 4,
    "tests/vllm_worker/test_vllm.py": 3,
    "tests/vllm_worker/test_worker.py": 12,
    "tests/worker/test_group_failures.py": 8,
    "tests/worker/test_parts.py": 4,
    "tests/worker/test_shared_store.py": 2,
}
"""What the long tests of a unit take on two cores, about. A unit is all tests with an id that begins so: the
longest name counts. The end of a run with `--shard` prints what units took."""
CLUSTERS = "tests/system/"
_STARTED = time.monotonic()
OTHERWISE = 0.3
"""Minutes of a test in a module that `MINUTES` does not name."""


def shard(text: str) -> tuple[int, int]:
    """`2/6` are the second and six. Raises what argparse shows for any other text."""
    number, slash, count = text.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise argparse.ArgumentTypeError(f"{text!r} is no shard: give one of several, as 1/6, 2/6 up to 6/6")


def unit(nodeid: str) -> str:
    named = [name for name in MINUTES if nodeid.startswith(name)]
    return max(named, key=len) if named else nodeid.partition("::")[0]


def shards(nodeids: Iterable[str], count: int) -> list[set[str]]:
    """The units of each shard. Each goes where the least is, the longest first.

    Tests of clusters come before all others: beside them, one after the other, a shard can run the rest.
    """
    tests = Counter(map(unit, nodeids))
    minutes = {name: MINUTES.get(name, OTHERWISE * number) for name, number in tests.items()}
    parts: list[set[str]] = [set() for _ in range(count)]
    taken = [0.0] * count
    for name in sorted(tests, key=lambda name: (not name.startswith(CLUSTERS), -minutes[name], name)):
        least = taken.index(min(taken))
        parts[least].add(name)
        taken[least] += minutes[name]
    return parts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=shard, metavar="N/COUNT", help="run one of COUNT parts of the tests")


@pytest.hookimpl(trylast=True)  # when other options have chosen the set
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chosen := config.option.shard:
        number, count = chosen
        ours = shards((item.nodeid for item in items), count)[number - 1]
        config.hook.pytest_deselected(items=[item for item in items if unit(item.nodeid) not in ours])
        items[:] = [item for item in items if unit(item.nodeid) in ours]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What each unit took, and the file of this run for docs/lab/runs."""
    if not config.option.shard or config.option.collectonly:
        return
    took: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[unit(report.nodeid)] += report.duration / 60
    terminalreporter.section("minutes")
    for name, minutes in sorted(took.items(), key=itemgetter(1), reverse=True):
        terminalreporter.write_line(f"{minutes:5.1f} {name}")
    git = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    )
    count = {name: len(reports) for name, reports in terminalreporter.stats.items()}
    failed = count.get("failed", 0) + count.get("error", 0)
    number, of = config.option.shard
    minutes = round((time.monotonic() - _STARTED) / 60)
    rows = [
        ("passed", count.get("passed", 0), "tests"),
        ("failed", failed, "tests"),
        ("minutes", minutes, "minutes"),
    ]
    run = {
        "bench": "tests",
        "section": "tests#long-tests",
        "started": str(date.today()),
        "card": None,
        "commit": git.stdout.strip(),
        "command": f"make test-long SHARD={number}/{of}",
        "note": None,
        "results": [dict(zip(("name", "value", "unit"), row, strict=True)) for row in rows],
    }
    terminalreporter.write_line(json.dumps(run))
