"""The control tick, and a sentry that stops the robot when the thread that ticks is stuck.

All callbacks of a node run on one executor thread. One that blocks there (a huge image, a disk that does not answer)
takes the ticks, ``~/abort`` and signals with it. The sentry is a thread of its own: it latches and publishes the stop,
paced by the control period, until the executor is back. Every use of the player holds the sentry's lock, so that there
is one writer at a time. A callback that blocks while it holds that lock, or the interpreter's, is beyond help from
inside the process: there the controller's own command timeout must act.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node

from phyai_engine.control.player import Player
from phyai_engine.timing import mono_ns
from phyai_engine.types import AbortCause
from phyai_engine.watchdog import late_tick
from phyai_ros.spin import Guard

JOIN_S = 1.0


class Ticker:
    """Timers from construction to :meth:`close`.

    :param simulated: the tick follows /clock, as the robot does; ``on_beat`` then runs on steady time beside it.
    :param on_tick: one control tick.
    """

    def __init__(
        self,
        node: Node,
        dt_s: float,
        guard: Guard,
        *,
        simulated: bool,
        sentry: Sentry,
        player: Player,
        on_tick: Callable[[], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._node, self._dt_s, self._sentry, self._player = node, dt_s, sentry, player
        self._on_tick, self._on_beat = on_tick, on_beat
        self._ticked_ns = mono_ns()
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timers = [node.create_timer(dt_s, guard(self._tick), clock=node.get_clock() if simulated else steady)]
        if simulated:
            self._timers.append(node.create_timer(dt_s, guard(self._beat), clock=steady))
        sentry.start()

    def close(self) -> None:
        """No tick and no sentry after this. Idempotent."""
        for timer in self._timers:
            self._node.destroy_timer(timer)
        self._timers = []
        self._sentry.close()

    def _tick(self) -> None:
        self._sentry.beat()
        self._ticked_ns = mono_ns()
        self._on_tick()

    def _beat(self) -> None:
        self._sentry.beat()
        self._on_beat()
        # A paused /clock must not leave a stop half published.
        if mono_ns() - self._ticked_ns > 2e9 * self._dt_s:
            with self._sentry.lock:
                if self._player.stopping:
                    self._player.tick()


class Sentry:
    """Watches the beats of the executor thread.

    :param limit_s: silence that is a stuck executor; 0 = never: no thread is started.
    :param abort: stops the robot and latches; called with the lock held, here and nowhere else from this thread.
    :param announce: tells others of the latch; called from this thread.
    """

    def __init__(
        self,
        player: Player,
        dt_s: float,
        limit_s: float,
        abort: Callable[[AbortCause, str], object],
        announce: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        """Held by whoever uses the player."""
        self._player, self._dt_s, self._limit_s = player, dt_s, limit_s
        self._abort, self._announce = abort, announce
        self._beat_ns = 0
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._beat_ns = mono_ns()
        if self._limit_s > 0:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._ended,), name="phyai-sentry", daemon=True)
            self._thread.start()

    def beat(self) -> None:
        """The executor thread is alive.

        :raises Exception: what went wrong in the sentry's thread, which goes on.
        """
        self._beat_ns = mono_ns()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread within JOIN_S. Idempotent; not to be called with the lock held."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(JOIN_S)

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self._limit_s / 4):
            try:
                silent_s = (mono_ns() - self._beat_ns) * 1e-9
                if silent_s > self._limit_s and self._needs_stop():
                    self._stop(ended, self._beat_ns, silent_s)
            except Exception as error:  # told by the next beat: nobody else listens to this thread
                self._failure = error

    def _needs_stop(self) -> bool:
        return self._player.safety.may_play or self._player.stopping

    def _stop(self, ended: threading.Event, heard_ns: int, silent_s: float) -> None:
        """Latch, then publish the rest of the stop, whoever began it, as long as the executor does not."""
        if not self.lock.acquire(timeout=self._limit_s):
            return  # stuck inside the player itself; asked again
        try:
            if self._beat_ns != heard_ns or not self._needs_stop():
                return
            if may_play := self._player.safety.may_play:
                self._abort(AbortCause.TICK_OVERRUN, late_tick(silent_s, self._limit_s))
        finally:
            self.lock.release()
        try:
            if may_play:
                self._announce()
        finally:
            self._step(ended, heard_ns)

    def _step(self, ended: threading.Event, heard_ns: int) -> None:
        while not ended.wait(self._dt_s):
            with self.lock:
                if self._beat_ns != heard_ns or not self._player.stopping:
                    return
                self._player.tick()
