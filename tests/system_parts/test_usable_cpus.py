"""What a process may use of its machine, as the files of a container, a service or a plain machine say it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.steps.averages import Average
from baton.system import available_memory, cpu_names, memory_limit, oom_kills, usable_cpus

GIB = 1 << 30


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "quotas", "cpus"),
    [
        pytest.param("0::/", {"cpu.max": "150000 100000"}, 2, id="container"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, 16, id="no quota"),
        pytest.param("0::/", {"cpu.max": "5000 100000"}, 1, id="a part of a CPU"),
        pytest.param("0::/", {"cpu.max": "6400000 100000"}, 16, id="more than the affinity"),
        pytest.param(
            "0::/a.slice/b.service", {"a.slice/b.service/cpu.max": "300000 100000"}, 3, id="service"
        ),
        pytest.param(
            "0::/a/b/c",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "800000 100000", "a/b/c/cpu.max": "max 100000"},
            2,
            id="the least of all above",
        ),
        pytest.param("0::/../other", {"cpu.max": "400000 100000"}, 4, id="outside of its namespace"),
        pytest.param("0::/docker/f00", {"cpu.max": "400000 100000"}, 4, id="the path of the host"),
        pytest.param(
            "4:memory:/m\n3:cpu,cpuacct:/pod\n0::/u",
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "250000", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000"},
            3,
            id="version 1",
        ),
        pytest.param(
            "3:cpu:/docker/f00",
            {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "10000"},
            5,
            id="version 1, the path of the host",
        ),
        pytest.param(
            "3:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"},
            16,
            id="version 1, no quota",
        ),
        pytest.param(
            "3:cpuset:/a\n0::/a", {"unified/a/cpu.max": "700000 100000"}, 7, id="version 2 beside version 1"
        ),
    ],
)
def test_cpus_are_those_of_the_affinity_within_each_quota(
    tmp_path: Path, groups: str, quotas: dict[str, str], cpus: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in quotas.items()}
    assert usable_cpus(written(tmp_path, {"proc/self/cgroup": groups, **files})) == cpus


def test_a_kernel_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 16


def test_processes_share_cpus_if_they_have_a_name_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(machine: str, cpus: set[int], group: str = "/", quota: str = "max 100000") -> set[str]:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: cpus)
        files = {
            "proc/sys/kernel/random/boot_id": f"{machine}-6d1c-4b09", "proc/self/cgroup": f"0::{group}",
            "proc/self/ns/cgroup": "", f"sys/fs/cgroup{group}/cpu.max": quota,
        }  # fmt: skip
        return set(cpu_names(written(tmp_path, files)))

    first = names("11111111", {0, 1})
    assert first & names("11111111", {1, 2})
    assert not first & names("11111111", {2, 3})
    assert not first & names("22222222", {0, 1})
    quota = names("11111111", {0, 1, 2, 3}, "/a", "200000 100000")
    assert quota == names("11111111", {0, 1, 2, 3}, "/a", "200000 100000")
    assert not quota & names("11111111", {0, 1, 2, 3}, "/b", "200000 100000")
    assert first & names("11111111", {0, 1}, "/c", "800000 100000"), "this quota limits nothing"


def test_a_kernel_that_does_not_name_itself_shares_nothing(tmp_path: Path) -> None:
    assert cpu_names(tmp_path) == []


@pytest.mark.parametrize(
    ("groups", "limits", "gib"),
    [
        ("0::/", {"memory.max": "max"}, 64),
        ("0::/", {"memory.max": str(3 * GIB), "memory.current": "0"}, 3),
        ("0::/", {"memory.max": str(16 * GIB), "memory.current": str(15 * GIB)}, 1),
        (
            "0::/",
            {
                "memory.max": str(16 * GIB),
                "memory.current": str(15 * GIB),
                "memory.stat": f"anon {7 * GIB}\nfile {8 * GIB}\nshmem {3 * GIB}\n"
                f"inactive_file {4 * GIB}\nactive_file {GIB}",
            },
            6,
        ),
        ("0::/", {"memory.max": str(2 * GIB), "memory.current": str(3 * GIB)}, 0),
        (
            "0::/a/b",
            {
                "a/memory.max": str(5 * GIB),
                "a/memory.current": str(3 * GIB),
                "a/b/memory.max": str(4 * GIB),
                "a/b/memory.current": str(GIB),
            },
            2,
        ),
        (
            "4:memory:/pod",
            {
                "memory/pod/memory.limit_in_bytes": str(7 * GIB),
                "memory/pod/memory.usage_in_bytes": str(6 * GIB),
                "memory/pod/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}",
            },
            3,
        ),
        (
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": str(9 * GIB),
            },
            64,
        ),
    ],
)
def test_memory_is_what_is_free_within_each_limit(
    tmp_path: Path, groups: str, limits: dict[str, str], gib: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    meminfo = f"MemTotal: {96 << 20} kB\nMemAvailable:  {64 << 20} kB"
    files |= {"proc/self/cgroup": groups, "proc/meminfo": meminfo}
    root = written(tmp_path, files)
    assert available_memory(root) == gib * GIB
    most = [
        int(size) for name, size in limits.items() if size != "max" and (".max" in name or ".limit" in name)
    ]
    assert memory_limit(root) == min([96 * GIB, *most])


@pytest.mark.parametrize(
    ("group", "files", "kills"),
    [
        ("0::/", {}, 0),
        ("0::/a", {"memory.events": "oom_kill 1", "a/memory.events": "max 9\noom 4\noom_kill 3"}, 3),
        ("4:memory:/a", {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2"}, 2),
    ],
)
def test_kills_for_want_of_memory_are_counted(
    tmp_path: Path, group: str, files: dict[str, str], kills: int
) -> None:
    made = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": group}
    root = written(tmp_path, made)
    assert oom_kills(root) == kills
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).write_text(text.replace(f"oom_kill {kills}", f"oom_kill {kills + 1}"))
    (root / "proc/self/cgroup").unlink()
    assert oom_kills(root) == (kills + 1 if files else 0), "its files are found once, and read each time"


def test_older_samples_of_an_average_weigh_less() -> None:
    seconds = Average(0.5)
    assert seconds.value == 0
    seconds.add(4.0)
    assert seconds.value == 4
    seconds.add(1.0)
    assert seconds.value == (0.5 * 4 + 1) / 1.5
    seconds.scale(0.5)
    assert seconds.value == (0.5 * 4 + 1) / 1.5 / 2
    seconds.add(1.0)
    assert seconds.value == ((0.5 * 4 + 1) / 4 + 1) / 1.75, "the next sample weighs as before"
    speed = Average(0.5)
    speed.add(100, 2.0)
    speed.add(100, 1.0, steps=2)
    assert speed.value == (25 + 100) / (0.5 + 1)
    speed.add(0.0, 0.0)
    assert speed.value == (25 + 100) / (0.5 + 1)


@pytest.mark.parametrize("ended", [False, True])
def test_a_process_does_not_outlive_a_parent_that_ended_early(ended: bool) -> None:
    """The kernel tells it of no end before it asks."""
    parent = 1 if ended else os.getpid()
    code = f"from baton.processes.children import die_with_parent as tie; tie({parent}); print('it lives')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("" if ended else "it lives\n", ended)


@pytest.mark.parametrize("first", ["GRPC_ENABLE_FORK_SUPPORT", "ANY"])
def test_a_process_has_a_title_whatever_its_first_variable_is(first: str) -> None:
    """Ray gives its actors variables in any order, and the import of baton changes some."""
    code = "import baton, os, setproctitle as s; os.environ.pop('ANY', ''); s.setproctitle('baton: it')"
    code += "; print(open('/proc/self/cmdline').read().strip(chr(0)))"
    variables = {first: "1"} | {name: value for name, value in os.environ.items() if name != first}
    ran = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert ran.stdout == "baton: it\n", ran.stderr
