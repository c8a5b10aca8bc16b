"""The metrics of all replicas as one text: each series gets a `replica` label."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def gathered(texts: Mapping[str, str]) -> bytes:
    """Texts that Prometheus reads, by replica, as one such text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gathered(texts))
    return generate_latest(registry)


class _Gathered(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    metric.samples.append(sample._replace(labels=labels))
        yield from found.values()
