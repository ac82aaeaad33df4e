"""Who is let in: every reason why a server refuses a hello, before any replica hears of the robot."""

from __future__ import annotations

from collections.abc import Mapping

from phyai_engine.config import RobotConfig, convert
from phyai_engine.errors import EngineRefusedError
from phyai_engine.robot_check import check_robot
from phyai_engine.serve.pool import Pool
from phyai_engine.serve.protocol import Hello
from phyai_engine.serve.server_config import ServerConfig
from phyai_engine.serve.sessions import Session, Sessions
from phyai_engine.serve.streams import KeptStreams


class Refused(EngineRefusedError):
    """A hello is refused.

    :param retry_s: when it may be worth another try; 0 = never.
    """

    def __init__(self, what: str, *, retry_s: float = 0.0, **rest: object) -> None:
        self.retry_s = retry_s
        super().__init__(what, **rest)  # type: ignore[arg-type]


def welcome(
    hello: Hello,
    peer: bytes,
    user: str,
    pools: Mapping[str, Pool],
    sessions: Sessions,
    config: ServerConfig,
    now_s: float,
) -> Session:
    """A new session, not yet in ``sessions``.

    :param user: name of the key that the connection came with, "" where none is asked for.
    :raises Refused: with the reason. :raises ConfigError: the robot's configuration is wrong.
    """
    if isinstance(hello.model, dict):
        raise Refused("a server loads no model for a robot", got="a model file", wanted=_names(pools))
    if (pool := pools.get(hello.model)) is None:
        raise Refused("no such model", got=hello.model, wanted=_names(pools))
    if pool.failure:
        raise Refused("the model cannot be served", got=pool.failure)
    robot = convert(hello.robot, RobotConfig, where="hello: robot")
    check_robot(robot, where="hello: robot")
    robot_id = hello.robot_id or robot.robot_id
    if user and robot_id != user:
        raise Refused("the robot id is not that of its key", got=robot_id, wanted=user)
    _check_free(hello, robot_id, sessions, config, now_s)
    _check_expectations(hello, pool)
    return Session(
        robot_id=robot_id,
        peer=peer,
        slot=sessions.next_slot(),
        user=user,
        hello=hello,
        robot=robot,
        pool=pool,
        seen_s=now_s,
        streams=KeptStreams([camera.name for camera in robot.cameras]),
    )


def _check_free(hello: Hello, robot_id: str, sessions: Sessions, config: ServerConfig, now_s: float) -> None:
    """One session per robot id: the same instance takes its own over, another one has to wait until it expired."""
    held = sessions.of_robot(robot_id)
    if held is None:
        if len(sessions) >= config.sessions_max:
            raise Refused(
                "no room for another robot", got=len(sessions), wanted=f"< {config.sessions_max}", retry_s=1.0
            )
    elif held.hello.instance != hello.instance:
        raise Refused(
            "the robot id is in use: two robots have one id, or this one was restarted just now",
            got=robot_id,
            wanted=f"an id of its own, or {config.expiry_s:g} s of silence of the other",
            retry_s=max(0.1, config.expiry_s - (now_s - held.seen_s)),
        )


def _check_expectations(hello: Hello, pool: Pool) -> None:
    """What the client counts on. A model that still loads is asked again by the client, which checks its answer."""
    engine = pool.engine
    if engine is None:
        return
    if hello.horizon and hello.horizon != engine.horizon:
        raise Refused("another horizon", got=engine.horizon, wanted=hello.horizon, where=f"model {pool.name}")
    if hello.statistics and hello.statistics != engine.statistics:
        raise Refused("other statistics", got=engine.statistics, wanted=hello.statistics, where=f"model {pool.name}")


def _names(pools: Mapping[str, Pool]) -> str:
    return f"one of {', '.join(pools)}"
