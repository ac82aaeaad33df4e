"""The figures of a server: counted once, shown to people (`phyai status`) and to Prometheus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from phyai_engine.errors import ConfigError
from phyai_engine.timing import Window

_WINDOW = 4096


class Figures:
    """For the front's thread; a Prometheus page reads a value at a time, which may be one request behind another.

    :ivar outcomes: (model, outcome) -> requests. ``late`` ones are answered ones too.
    :ivar events: name -> how often.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.bytes_in = 0
        self._windows: dict[tuple[str, str], Window] = {}

    def timed(self, model: str, stage: str, ms: float) -> None:
        """A request spent so long in a stage."""
        window = self._windows.get((model, stage))
        if window is None:
            window = self._windows[model, stage] = Window(_WINDOW)
        window.add(ms)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and value, for people."""
        for (model, outcome), count in sorted(self.outcomes.items()):
            yield f"{model} {outcome}", str(count)
        for (model, stage), window in sorted(self._windows.items()):
            seen = window.percentiles()
            yield f"{model} {stage}", f"p50 {seen.p50:.1f}, p99 {seen.p99:.1f}, max {seen.max:.1f}, n {seen.n}"
        for name, count in sorted(self.events.items()):
            yield name, str(count)
        yield "received", f"{self.bytes_in / 1e6:.1f} MB"

    def collect(self, gauges: Callable[[], Iterator[tuple[str, str, float]]]) -> Iterator[Any]:
        """For Prometheus. :param gauges: (name, model, value) of what is so now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - the serve extra

        requests = CounterMetricFamily("phyai_requests", "Requests by outcome.", labels=["model", "outcome"])
        for (model, outcome), count in list(self.outcomes.items()):
            requests.add_metric([model, outcome], count)
        yield requests
        events = CounterMetricFamily("phyai_events", "What else happened.", labels=["event"])
        for name, count in list(self.events.items()):
            events.add_metric([name], count)
        yield events
        yield CounterMetricFamily("phyai_received_bytes", "From robots.", value=self.bytes_in)
        p99 = GaugeMetricFamily("phyai_stage_p99_ms", f"Of the last {_WINDOW} requests.", labels=["model", "stage"])
        for (model, stage), window in list(self._windows.items()):
            if not math.isnan(value := window.percentiles().p99):
                p99.add_metric([model, stage], value)
        yield p99
        now = GaugeMetricFamily("phyai_now", "As it is now.", labels=["what", "model"])
        for name, model, value in gauges():
            now.add_metric([name, model], value)
        yield now


def open_page(
    port: int, figures: Figures, gauges: Callable[[], Iterator[tuple[str, str, float]]]
) -> Callable[[], None]:
    """Serve the figures on 127.0.0.1 in a thread of its own.

    :returns: what closes it.
    :raises ConfigError: the port is taken.
    """
    import prometheus_client  # noqa: PLC0415 - the serve extra
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Page(Collector):
        def collect(self) -> Iterator[Any]:
            return figures.collect(gauges)

    registry = prometheus_client.CollectorRegistry()
    registry.register(Page())
    try:
        server, thread = prometheus_client.start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError(
            f"the metrics page cannot be served: {error.strerror}", got=port, where="metrics_port"
        ) from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
