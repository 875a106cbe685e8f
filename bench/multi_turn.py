"""Sticky routing against round robin, on real workers whose prefix caches are too small: multi-turn chats.

    python -m bench.multi_turn [--json PATH] [--short]

Two prefill workers and one decode worker of the embedded model, without Ray; `baton bench run` sends chats of
six turns from six users. A chat's turns share all that was said before, and each group of chats a system
prompt: what a turn finds in its worker's prefix cache is what routing is worth. Each policy gets workers of
its own, with empty caches, and the same seed. Overflow to decode is off: it has no prefix cache here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import bench.contract as contract
from bench.contract import Report, Row
from bench.roles import Roles

POLICIES = ("sticky", "round-robin")
TURNS, USERS = 6, 6
LOAD = (
    "--turns", str(TURNS), "--concurrency", str(USERS), "--think-time", "exponential:3",
    "--input-len", "160", "--prefix-len", "64", "--prefix-groups", "2", "--output-len", "12",
    "--warmup", "15", "--seed", "7",
)  # fmt: skip


def measure(policy: str, blocks: int, duration: float, model: list[str]) -> dict[str, float]:
    """One policy: the rows of `baton bench`, share of hits, and how full the caches were at the end."""
    worker = [*model, "--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "16", "--port", "0"]
    worker += ["--max-model-len", "2000"]
    limited = ("--num-blocks", str(blocks))
    with tempfile.TemporaryDirectory() as directory, Roles() as roles:
        prefills = [roles.start("prefill", *worker, *limited, "--index", str(i)) for i in range(2)]
        decode = roles.start("decode", *worker, "--num-blocks", "1500")
        addresses = [flag for w in (*prefills, decode) for flag in ("--worker", w["address"])]
        router = roles.start(
            "router", *model, "--port", "0", *addresses, "--routing-policy", policy, "--no-overflow"
        )
        out = Path(directory) / "load.json"
        command = [sys.executable, "-m", "cluster.cli", "bench", "run", "--url", router["url"], *LOAD]
        command += ["--duration", str(duration), "--json", str(out)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # 3: the client was slow, and says so
        found: dict[str, float] = {r["name"]: r["value"] for r in json.loads(out.read_text())["results"]}
        pages = [_metrics(w["metrics_address"]) for w in prefills]
    queries, hits = (sum(page[f"vllm:prefix_cache_{n}_total"] for page in pages) for n in ("queries", "hits"))
    full = min(page["baton:prefix_cache_usage_perc"] for page in pages)
    return found | {"hits": hits / max(1.0, queries), "full": full}


def _metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        families: Any = text_string_to_metric_families(page.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def main() -> int:
    p = contract.parser(__doc__ or "", devices=("cpu",))
    p.add_argument("--blocks", type=int, default=170, help="KV blocks of a prefill worker (default: 170)")
    p.add_argument("--duration", type=float, help="seconds for each policy (default: 100; --short: 30)")
    p.add_argument("--model", help="default: the embedded one")
    args = p.parse_args()
    duration = args.duration or (30.0 if args.short else 100.0)
    report = Report("multi_turn", {"blocks": args.blocks, "duration": duration, "load": LOAD}, args.json)
    model = ["--model", args.model] if args.model else []
    found = {policy: measure(policy, args.blocks, duration, model) for policy in POLICIES}
    for policy, values in found.items():
        bound = 0.45 if policy == "sticky" else None
        better = "higher" if bound is not None else None
        name = f"multi_turn.{policy}"
        report.add(Row(f"{name}.hits", values["hits"], "share", goal=bound, better=better))
        report.add(Row(f"{name}.cache_full", values["full"], "share"))
        report.add(Row(f"{name}.ttft", values["ttft.p50"], "ms", p99=values["ttft.p99"]))
        report.add(Row(f"{name}.requests", values["requests.ok"], "requests"))
        report.add(Row(f"{name}.failed", values["requests.failed"], "requests"))
    report.detail = found
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
