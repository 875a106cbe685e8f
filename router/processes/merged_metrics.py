"""Merges the metrics of all processes of a router into one page.

Each process counts in its own memory, without files or locks. (`prometheus_client`'s multiprocess mode writes
each observation to a mapped file.) Only a scrape pays for the sums. Counters and histograms of a process that
died stay in the sums, as last scraped. A sum that falls would look like a restart of all processes.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# Every process reports the same fact. The page has the largest value, but of ready workers the smallest: a
# process that reaches none must not be hidden by the others.
_ALIKE = {
    "vllm:kv_cache_usage_perc",
    "baton:workers",
    "baton:workers_left_out",
    "baton:paused",
    "baton:router_start_time_seconds",
    "baton:certificate_expiry_time_seconds",
    "baton:expected_wait_seconds",
}
# These belong to one operating system process. The page has each value, with a label `process`.
_OWN = ("process_", "python_")
_GROWING = ("counter", "histogram")

Labels = tuple[tuple[str, str], ...]
Family = tuple[str, str, str]  # name, kind, help
Sums = dict[Family, dict[tuple[str, Labels], float]]


class MergedMetrics:
    """The last metrics of each process. Owned by the supervisor."""

    def __init__(self) -> None:
        self._last: dict[str, Sums] = {}
        self._ended: Sums = {}

    def ended(self, process: str) -> None:
        """Keeps the counters of a process that has ended."""
        for family, samples in self._last.pop(process, {}).items():
            if family[1] in _GROWING and not family[0].startswith(_OWN):
                _add(self._ended.setdefault(family, {}), samples)

    def page(self, pages: Mapping[str, bytes]) -> bytes:
        """Returns the merged page.

        `pages` has one for each process that replied; others count with their last one.
        """
        self._last |= {process: _parse(process, page.decode()) for process, page in pages.items()}
        sums: Sums = {}
        for process_sums in (self._ended, *self._last.values()):
            for family, samples in process_sums.items():
                into = sums.setdefault(family, {})
                if family[0] in _ALIKE:
                    into |= {
                        key: _worst(key[1])(value, into.get(key, value)) for key, value in samples.items()
                    }
                else:
                    _add(into, samples)
        return generate_latest(_Page(sums))  # pyrefly: ignore[bad-argument-type]  (it only collects)


def _worst(labels: Labels) -> Callable[[float, float], float]:
    return min if ("state", "ready") in labels else max


def _parse(process: str, page: str) -> Sums:
    sums: Sums = {}
    for family in text_string_to_metric_families(page):
        samples = sums.setdefault((family.name, family.type, family.documentation), {})
        for sample in family.samples:
            labels = sample.labels | ({"process": process} if family.name.startswith(_OWN) else {})
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return sums


def _add(into: dict[tuple[str, Labels], float], samples: Mapping[tuple[str, Labels], float]) -> None:
    for key, value in samples.items():
        into[key] = into.get(key, 0.0) + value


class _Page(Collector):
    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def collect(self) -> Iterable[Metric]:
        for (name, kind, text), samples in self._sums.items():
            metric = Metric(name, text, kind)
            for (sample, labels), value in samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric
