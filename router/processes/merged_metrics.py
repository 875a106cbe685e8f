"""One page of metrics for all processes of a router.

Each process counts by itself, without files or locks between them (which is what `prometheus_client`'s own
multiprocess mode would put under every observation); only a scrape pays for adding up. Counters and
histograms of a process that died stay in the sums, as last scraped: a sum that fell would look like a restart
of all of them.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# What every process says of the same thing: the largest is shown.
_ALIKE = {"baton:workers", "baton:workers_left_out", "baton:router_start_time_seconds"}
# What belongs to one operating system process: shown for each, told apart by a label.
_OWN = ("process_", "python_")
_GROWING = ("counter", "histogram")

Labels = tuple[tuple[str, str], ...]
Family = tuple[str, str, str]  # name, kind, help
Sums = dict[Family, dict[tuple[str, Labels], float]]


class MergedMetrics:
    """Owned by the supervisor; remembers each process' last page."""

    def __init__(self) -> None:
        self._last: dict[str, Sums] = {}
        self._ended: Sums = {}

    def ended(self, process: str) -> None:
        """That process is gone; what it counted stays."""
        for family, samples in self._last.pop(process, {}).items():
            if family[1] in _GROWING and not family[0].startswith(_OWN):
                _add(self._ended.setdefault(family, {}), samples)

    def page(self, pages: Mapping[str, bytes]) -> bytes:
        """`pages`: of each process that answered; one that did not is shown as it was last."""
        self._last |= {process: _parse(process, page.decode()) for process, page in pages.items()}
        sums: Sums = {}
        for found in (self._ended, *self._last.values()):
            for family, samples in found.items():
                into = sums.setdefault(family, {})
                if family[0] in _ALIKE:
                    into |= {key: max(value, into.get(key, value)) for key, value in samples.items()}
                else:
                    _add(into, samples)
        return generate_latest(_Page(sums))  # pyrefly: ignore[bad-argument-type]  (it only collects)


def _parse(process: str, page: str) -> Sums:
    found: Sums = {}
    for family in text_string_to_metric_families(page):
        samples = found.setdefault((family.name, family.type, family.documentation), {})
        for sample in family.samples:
            labels = sample.labels | ({"process": process} if family.name.startswith(_OWN) else {})
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


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
