"""/metrics: the engine's counts as Prometheus reads them."""

from collections.abc import Iterator

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlxft.serving.engine import Engine


class Metrics:
    """What the server measures. One registry for each server: two in one process stay apart."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.seconds = Histogram(
            "mlxft_http_request_seconds",
            "Seconds until an answer was complete",
            ["path", "status"],
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's numbers at this moment."""
        engine, counts = self._engine, self._engine.counts
        yield GaugeMetricFamily("mlxft_requests_active", "Requests in the batch", engine.num_active)
        yield GaugeMetricFamily("mlxft_requests_waiting", "Requests without a place", engine.num_waiting)
        mounted = len(engine.residents.listed())
        yield GaugeMetricFamily("mlxft_adapters_mounted", "Adapters in memory", mounted)
        yield GaugeMetricFamily("mlxft_memory_bytes", "Bytes of arrays", mx.get_active_memory())
        for name, number in (
            ("prompt", counts.prompt_tokens),
            ("cached_prompt", counts.cached_tokens),
            ("completion", counts.completion_tokens),
        ):
            yield CounterMetricFamily(f"mlxft_{name}_tokens", f"Tokens: {name.replace('_', ' ')}", number)
        finished = CounterMetricFamily("mlxft_requests", "Requests that are over, by how", labels=["reason"])
        for reason, number in list(counts.finished.items()):
            finished.add_metric([reason], number)
        yield finished
