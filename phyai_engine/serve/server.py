"""`phyai serve` and `phyai status`: a server from its file to its end, and one question to a running one."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import zmq

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import EngineError, EngineTimeoutError
from phyai_engine.serve.auth import Gate, check_bind, secure_client
from phyai_engine.serve.front import Front, open_socket
from phyai_engine.serve.keys import RobotKeys, server_keys
from phyai_engine.serve.metrics import Figures, open_page
from phyai_engine.serve.pool import Pool
from phyai_engine.serve.protocol import StatusQuery, StatusReply, decode, encode
from phyai_engine.serve.server_config import ServerConfig, load_server
from phyai_engine.serve.sockets import Wake, prepare
from phyai_engine.weights.checkpoint import model_from

_END_S = 5.0
_log = logging.getLogger(__name__)


class Server:
    """Everything of one server; a context manager that leaves nothing behind.

    :raises PhyaiError: a file is wrong, the address is taken, or open to other hosts without keys.
    """

    def __init__(self, config: ServerConfig) -> None:
        keys = Path(config.keys) if config.keys else None
        check_bind(config.endpoint, keys)
        self.figures = Figures()
        self.config, self._stop = config, False
        self._left = contextlib.ExitStack()
        with contextlib.ExitStack() as built:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            built.callback(context.term)
            wake = built.enter_context(contextlib.closing(Wake()))
            gate = None if keys is None else Gate(context, server_keys(keys))
            if gate is not None:
                built.callback(gate.close)
            socket = built.enter_context(open_socket(context, config, gate))
            self.pools = {name: self._pool(context, name) for name in config.models}
            self._wake = wake
            self.front = Front(
                socket,
                config,
                self.pools,
                gate,
                self.figures,
                wake=wake,
                stopping=lambda: self._stop,
                on_ready=self._ready,
            )
            if config.metrics_port:
                built.callback(open_page(config.metrics_port, self.figures, self.front.gauges))
            self._left = built.pop_all()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            until_s = time.monotonic() + _END_S
            for pool in self.pools.values():
                pool.ask_to_end()
            for name, pool in self.pools.items():
                if pool.end(until_s):
                    continue
                _log.error("%s: a replica did not end within %.0f s", name, _END_S)
        finally:
            self._left.close()

    def run(self) -> None:
        """Serve until :meth:`stop`.

        :raises EngineError: no model can be served.
        """
        for pool in self.pools.values():
            pool.start()
        self.front.run()
        if reasons := [f"{name}: {pool.failure}" for name, pool in self.pools.items() if pool.failure]:
            raise EngineError("a model could not be served", got="; ".join(reasons))

    def stop(self) -> None:
        """Finish what is under way and end; from any thread, or a signal."""
        self._stop = True
        self._wake.set()

    def _pool(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> Pool:
        served = self.config.models[name]
        robot, model = load_robot(resolve("robots", served.robot)), model_from(served.model)
        return Pool(context, name, served, model, robot, start_timeout_s=self.config.start_timeout_s)

    def _ready(self) -> None:
        print(f"ready {self.config.endpoint}", flush=True)  # for whoever started this process


def serve_command(config: str) -> None:
    """Serve until SIGTERM or SIGINT.

    :raises PhyaiError: see :class:`Server`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with Server(load_server(config)) as server, _signals(server):
        server.run()


@contextlib.contextmanager
def _signals(server: Server) -> Iterator[None]:
    """The first one drains; the second ends as it always did."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        server.stop()
        for each in had:
            signal.signal(each, signal.SIG_DFL)

    had = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in had.items():
            signal.signal(number, handler)


def server_status(
    endpoint: str, keys: RobotKeys | None = None, *, timeout_s: float = 2.0
) -> tuple[tuple[str, str], ...]:
    """How a server does: lines of name and value.

    :raises EngineTimeoutError: it does not answer.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        prepare(socket, endpoint)
        if keys is not None:
            secure_client(socket, keys)
        socket.connect(endpoint)
        socket.send_multipart(encode(StatusQuery()))
        if not socket.poll(int(timeout_s * 1e3)):
            raise EngineTimeoutError("the server does not answer", wanted=f"within {timeout_s} s", where=endpoint)
        message, _ = decode(socket.recv_multipart())
    if not isinstance(message, StatusReply):
        raise EngineError("the server gave no status", got=message, where=endpoint)
    return message.lines
