"""The policy node without DDS, its clock, and an engine in the test's hand; see desk.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engines import NOTHING, rows, spoiled

from phyai_engine.errors import CancelledError, EngineDiedError, EngineError
from phyai_engine.serve.in_flight import InFlight
from phyai_engine.serve.protocol import EngineHello
from phyai_engine.types import Chunk, Request
from phyai_ros.convert import to_stamp
from phyai_ros.policy_node import PolicyNode

HORIZON = 6


class Worker:
    """Stands for EngineClient: the real mailbox, and an engine in the test's hand."""

    def __init__(self, desk: Any, on_event: Callable[[], None]) -> None:
        self._desk, self._on_event = desk, on_event
        self.box = InFlight()
        self.computing: Request | None = None
        self.last: Chunk | None = None
        self.alive = True
        self.pid, self.crash, self.connection = os.getpid(), None, ""

    def start(self, progress: Any = None, *, give_up: Any = None) -> EngineHello:
        if self._desk.engine_fails:
            self.alive = False
            raise EngineDiedError("the engine ended", got="exit code 13")
        self._desk.worker = self
        names = ("joint",)
        versions: dict[str, str] = {}
        return EngineHello(
            horizon=HORIZON, action_names=names, dt_s=0.1, note="", warm_up_ms=(80.0,), pid=1, versions=versions
        )

    def stop(self, timeout_s: float = 2.0, *, ask: bool = True) -> bool:
        self.alive = False
        self.box.close(CancelledError("the client was stopped"), lost=False)
        return True

    def submit(self, request: Request) -> None:
        self._desk.monitor.request(request)
        self.box.submit(request)
        self.work()

    def cancel(self, epoch: int) -> None:
        self.box.cancel(epoch)
        self.work()

    def poll(self) -> Any:
        return self.box.poll()

    def last_heartbeat_age_s(self) -> float:
        return 0.0

    @property
    def counters(self) -> dict[str, int]:
        return self.box.counters

    def work(self) -> None:
        """A turn of the client's thread."""
        self.box.take_cancel()
        if self.computing is None:
            self.computing = self.box.take_request()
        if self.box.take_announcement():
            self._on_event()

    def finish(self, kind: str) -> None:
        """What it computes ends: with a chunk (see spoiled), ``fail`` or ``cancelled``."""
        request, self.computing = self.computing, None
        if request is None:
            return
        ids = request.epoch, request.chunk_id
        if kind == "fail":
            self.box.failed(*ids, EngineError("planted"))
        elif kind == "cancelled":
            self.box.failed(*ids, CancelledError("it was cancelled"))
        else:
            self.last = Chunk(*ids, spoiled(rows(HORIZON, request.chunk_id), kind), NOTHING)
            self.box.answered(self.last)
        self.work()

    def repeat(self) -> None:
        """Its last reply comes again."""
        if self.last is not None:
            self.box.answered(self.last)
            self.work()

    def die(self) -> None:
        """It ends, or its heartbeat does."""
        self.alive, self.computing = False, None
        self.box.close(EngineDiedError("exit code 13"), lost=True)
        if self.box.take_announcement():
            self._on_event()


class NodeInHand(PolicyNode):
    """The policy node; publishers, subscriptions, services and timers are kept instead of made."""

    def __init__(self, desk: Any, **kwargs: Any) -> None:
        self.desk, desk.node = desk, self
        self.callbacks: dict[str, list[Any]] = {}
        self.timers_kept: list[Any] = []
        super().__init__(**kwargs)

    def create_publisher(self, kind: Any, topic: str, qos: Any, **_: Any) -> Any:
        return SimpleNamespace(publish=self.desk.heard)

    create_lifecycle_publisher = create_publisher

    def destroy_lifecycle_publisher(self, publisher: Any) -> None: ...

    def create_subscription(self, kind: Any, topic: str, callback: Any, qos: Any, **_: Any) -> Any:
        self.callbacks.setdefault(topic, []).append(callback)
        return topic, callback

    def destroy_subscription(self, subscription: Any) -> bool:
        topic, callback = subscription
        self.callbacks[topic].remove(callback)
        return True

    def create_service(self, kind: Any, name: str, callback: Any, **_: Any) -> None:
        self.callbacks[name] = [callback]

    def create_guard_condition(self, callback: Any, **_: Any) -> Any:
        return SimpleNamespace(trigger=lambda: self.desk.pending.append(callback))

    def destroy_guard_condition(self, guard: Any) -> bool:
        self.desk.pending.clear()
        return True

    def create_timer(self, period_s: float, callback: Any, **_: Any) -> Any:
        timer = SimpleNamespace(period_s=period_s, callback=callback)
        self.timers_kept.append(timer)
        return timer

    def destroy_timer(self, timer: Any) -> bool:
        self.timers_kept.remove(timer)
        return True

    def get_clock(self) -> Any:
        return self.desk.clock if hasattr(self, "desk") else super().get_clock()

    def get_logger(self) -> Any:
        return self.desk.logger


class FakeClock:
    """ROS time, in the test's hand."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk
        self.on_jump: Any = None

    def now(self) -> Any:
        ns = self._desk.ros_ns
        return SimpleNamespace(nanoseconds=ns, to_msg=lambda: to_stamp(ns))

    def create_jump_callback(self, threshold: Any, *, post_callback: Any) -> Any:
        self.on_jump = post_callback
        return SimpleNamespace(unregister=lambda: None)
