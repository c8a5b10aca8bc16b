"""What Prometheus sees. Labels are names of adapters that are served, never what a request made up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..errors import PoolError
from .events import Events

if TYPE_CHECKING:
    from ..model import AttachedModel
    from .admission import Admission
    from .engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

BASE_LABEL = "base"
"""The adapter label of requests for the base model."""


class Metrics:
    """Counters and histograms of one server, with a registry of their own.

    Attributes:
        events: Loads, evictions and refusals as they happened.
    """

    def __init__(self) -> None:
        self.events = Events()
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("hotslot_requests", "Requests by how they ended", ["adapter", "outcome"], registry=registry)
        self._prompt = Counter("hotslot_prompt_tokens", "Tokens of prompts", ["adapter"], registry=registry)
        self._cached = Counter("hotslot_cached_tokens", "Tokens of prompts found in shared blocks", ["adapter"], registry=registry)
        self._generated = Counter("hotslot_generation_tokens", "Tokens generated", ["adapter"], registry=registry)
        self._first = Histogram(
            "hotslot_time_to_first_token_seconds",
            "From arrival to the first token",
            ["adapter"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "hotslot_inter_token_seconds", "Between two tokens of a row", ["adapter"], buckets=_STEPS, registry=registry
        )
        self._lookups = Counter(
            "hotslot_adapter_lookups", "Requests by where their adapter was", ["adapter", "tier", "result"], registry=registry
        )
        self._stages = Histogram(
            "hotslot_load_seconds", "Loads by stage: turn, load, digest", ["stage"], buckets=_SECONDS, registry=registry
        )
        self._loads = Counter("hotslot_loads", "Loads into a slot", ["adapter"], registry=registry)
        self._evictions = Counter("hotslot_evictions", "Adapters that gave their slot to another", ["adapter"], registry=registry)
        self._refused = Counter("hotslot_refused_loads", "Loads that were refused, by error", ["reason"], registry=registry)
        self._rejected = Counter("hotslot_rejected_requests", "Requests answered 4xx or 5xx", ["status"], registry=registry)

    def watch(self, lora: AttachedModel, admission: Admission, engine: Engine) -> None:
        """Show the pool, the queue and the engine as they are at each scrape."""
        self._registry.register(PoolCollector(lora, admission, engine))

    def scrape(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    # --- requests --------------------------------------------------------------------------------------------------------

    def first_token(self, adapter: str | None, seconds: float) -> None:
        """A row's first token came."""
        self._first.labels(adapter or BASE_LABEL).observe(seconds)

    def next_token(self, adapter: str | None, seconds: float) -> None:
        """Another token came."""
        self._between.labels(adapter or BASE_LABEL).observe(seconds)

    def ended(self, adapter: str | None, outcome: str, prompt: int, cached: int, generated: int) -> None:
        """A request has ended."""
        label = adapter or BASE_LABEL
        self._requests.labels(label, outcome).inc()
        self._prompt.labels(label).inc(prompt)
        self._cached.labels(label).inc(cached)
        self._generated.labels(label).inc(generated)

    def rejected(self, status: int) -> None:
        """A request was answered with an error."""
        self._rejected.labels(str(status)).inc()

    # --- adapters --------------------------------------------------------------------------------------------------------

    def lookup(self, adapter: str, is_resident: bool) -> None:
        """A request came for an adapter that was, or was not, in a slot."""
        tier, result = ("device", "hit") if is_resident else ("disk", "miss")
        self._lookups.labels(adapter, tier, result).inc()

    def waited(self, seconds: float) -> None:
        """An adapter's turn began after this long."""
        self._stages.labels("turn").observe(seconds)

    @contextmanager
    def load_stage(self, stage: str) -> Iterator[None]:
        """Measure one stage of a load."""
        start = time.monotonic()
        yield
        self._stages.labels(stage).observe(time.monotonic() - start)

    @contextmanager
    def load(self, adapter: str) -> Iterator[None]:
        """Measure a load into a slot, and count it or its refusal."""
        start = time.monotonic()
        try:
            with self.load_stage("load"):
                yield
        except PoolError as error:
            # A full pool is no fault of the adapter's; one that needs more room than there is, is.
            if getattr(error, "needed", None) is not None:
                self.refused(adapter, error)
            raise
        except Exception as error:
            self.refused(adapter, error)
            raise
        self._loads.labels(adapter).inc()
        self.events.add("loaded", adapter=adapter, seconds=round(time.monotonic() - start, 4))

    def refused(self, adapter: str, error: BaseException) -> None:
        """A load ended with an error."""
        self._refused.labels(type(error).__name__).inc()
        self.events.add("refused", adapter=adapter, reason=type(error).__name__)

    def evicted(self, adapter: str, by: str) -> None:
        """An adapter lost its slot to another."""
        self._evictions.labels(adapter).inc()
        self.events.add("evicted", adapter=adapter, by=by)

    def forget(self, adapter: str) -> None:
        """Drop an adapter's series: it is served no more."""
        for metric in (self._prompt, self._cached, self._generated, self._first, self._between, self._loads, self._evictions):
            _remove(metric, lambda labels: labels[0] == adapter)
        for metric in (self._requests, self._lookups):
            _remove(metric, lambda labels: labels[0] == adapter)

    def counts_of(self, adapter: str) -> dict[str, int]:
        """Requests that found an adapter in its slot, and that did not."""
        found = {"hits": 0, "misses": 0}
        lookups: Any = self._lookups
        for labels, child in list(lookups._metrics.items()):
            if labels[0] == adapter:
                found["hits" if labels[2] == "hit" else "misses"] += int(child._value.get())
        return found


class PoolCollector(Collector):
    """Gauges that are read when they are asked for: one series each, whatever the adapters are called."""

    def __init__(self, lora: AttachedModel, admission: Admission, engine: Engine) -> None:
        self._lora = lora
        self._admission = admission
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The gauges now."""
        if self._lora.closed:
            return
        infos = self._lora.slots()
        states = self._admission.states()
        slots = GaugeMetricFamily("hotslot_slots", "Slots by state", labels=["state"])
        for state in ("empty", "loading", "ready", "retired"):
            slots.add_metric([state], sum(info.state == state for info in infos))
        slots.add_metric(["pinned"], sum(info.pinned for info in infos))
        slots.add_metric(["total"], len(infos))
        yield slots
        yield _gauge("hotslot_references", "References on slots", sum(info.ref_count for info in infos))
        yield _gauge("hotslot_pool_bytes", "Bytes of the pool", self._lora.weights.pool_bytes)
        yield _gauge("hotslot_resident_bytes", "Bytes of the adapters in slots", sum(info.nbytes for info in infos))
        yield _gauge("hotslot_engine_steps", "Steps of the engine so far", self._engine.num_steps)
        yield _gauge("hotslot_engine_up", "Whether the engine runs", float(self._engine.fault is None))
        yield _gauge("vllm:num_requests_running", "Sequences in the batch", self._admission.num_running)
        yield _gauge("vllm:num_requests_waiting", "Requests that wait", self._admission.num_waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "Used share of the key-value cache", self._engine.cache_usage)
        # What gateways route by. Resident or on its way counts as running: a request there finds its adapter.
        running = {info.name for info in infos if info.state == "ready" and info.name}
        running |= {name for name, (state, _, _) in states.items() if state in ("loading", "ready", "draining")}
        waiting = {name for name, (state, _, _) in states.items() if state == "waiting"} - running
        lora_info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in slots and adapters that wait; the value is the time",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lora_info.add_metric([str(len(infos)), ",".join(sorted(running)), ",".join(sorted(waiting))], time.time())
        yield lora_info


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _remove(metric: Any, matches: Callable[[tuple[str, ...]], bool]) -> None:
    for labels in [labels for labels in list(metric._metrics) if matches(labels)]:
        metric.remove(*labels)
