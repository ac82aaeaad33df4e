"""The server's file (config/serve/*.yaml) -> frozen values."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from phyai_engine.config import Name, NonNegative, Positive, convert, read_yaml, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.serve.auth import Limits
from phyai_engine.serve.batcher import WINDOW_MAX_MS

Size = Annotated[int, Meta(ge=1, le=1024)]


class ServedModel(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model of a server.

    :param model: a shipped model's name, a yaml, or a checkpoint folder. :param robot: a robot file of the kind that
        will come: the model is warmed up and timed with it. Robots of other kinds may come too, if they fit the model.
    :param replicas: processes that run the model, where it computes without an accelerator.
    :param devices: an accelerator's index for each replica instead; one process each.
    :param share_devices: let several replicas have the same one, in this model or another. Refused unless said: they
        take turns, each with its own copy of the weights; two slow each other down more than a larger batch does.
    :param buckets: batch sizes to capture and to time. :param window_ms: how long a free replica waits for more rows.
    :param threads: CPU threads of each replica, 0 = its library's default.
    """

    model: Name
    robot: Name
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    devices: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=64)] = ()
    share_devices: bool = False
    buckets: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=24)] = (1, 2, 4, 8)
    window_ms: Annotated[float, Meta(ge=0, le=WINDOW_MAX_MS)] = 2.0
    threads: Annotated[int, Meta(ge=0)] = 1

    @property
    def places(self) -> tuple[int | None, ...]:
        """The device of each replica, None where the model file decides."""
        return self.devices or (None,) * self.replicas


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server.

    :param endpoint: to bind: tcp://HOST:PORT, tcp://[IPV6]:PORT ([::] takes IPv4 as well) or ipc://PATH.
    :param keys: folder of `phyai keygen`; needed beyond this host. :param models: name -> model; a robot asks for one
        by its name.
    :param limits: of each robot. :param sessions_max: robots at a time. :param expiry_s: silence that ends a session.
    :param heartbeat_s: between two signs of life to each robot.
    :param return_ms: of each budget, kept for the way back to the robot.
    :param hold_ms: budget of a robot that plays nothing, so that no handoff waits; ``budget_max_ms`` of any other.
    :param start_timeout_s: for a replica to load, capture and warm up.
    :param drain_s: for what is under way, at the end.
    :param metrics_port: of the Prometheus page on 127.0.0.1, 0 = none.
    """

    models: Annotated[dict[Name, ServedModel], Meta(min_length=1, max_length=16)]
    endpoint: Name = "tcp://127.0.0.1:5599"
    keys: str = ""
    limits: Limits = field(default_factory=Limits)
    sessions_max: Annotated[int, Meta(ge=1, le=4096)] = 256
    expiry_s: Positive = 3.0
    heartbeat_s: Annotated[float, Meta(ge=0.02, le=5)] = 0.2
    return_ms: NonNegative = 3.0
    hold_ms: Positive = 500.0
    budget_max_ms: Positive = 5000.0
    start_timeout_s: Positive = 600.0
    drain_s: NonNegative = 5.0
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0


def load_server(name: str) -> ServerConfig:
    """Read and cross-check a server file: a path, or the name of a shipped one.

    :raises ConfigError: with the path of the wrong key.
    """
    path = resolve("serve", name)
    config = convert(read_yaml(path), ServerConfig, where=str(path))
    _check_devices(config, str(path))
    if config.expiry_s < 3 * config.heartbeat_s:
        raise ConfigError(
            "sessions would expire between two signs of life",
            got=f"expiry_s {config.expiry_s}",
            wanted=f">= 3 x heartbeat_s, {3 * config.heartbeat_s:g}",
            where=path,
        )
    return config


def _check_devices(config: ServerConfig, where: str) -> None:
    taken: dict[int, str] = {}
    for name, served in config.models.items():
        if served.devices and served.replicas > 1:
            raise ConfigError(
                "replicas and devices both say how many", where=f"{where}: models.{name}", do="Keep devices alone."
            )
        for device in served.devices:
            if device in taken and not served.share_devices:
                raise ConfigError(
                    f"two replicas on device {device}",
                    got=f"models {taken[device]} and {name}",
                    wanted="one process per device",
                    where=f"{where}: models.{name}.devices",
                    do="They would take turns, each with its own weights: larger buckets serve more. "
                    "If you measured otherwise, say share_devices: true.",
                )
            taken[device] = name
