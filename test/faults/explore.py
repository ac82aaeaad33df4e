"""Breadth-first search of a closed model: every state its events can reach, the invariants checked on every transition.

A model is made of real objects. Between two transitions their attributes are put back, so that one set of objects
visits all states. Two states are one when they differ only in how long the model has run: numbers that only grow
(epochs, chunk ids, counts, clocks) are taken relative to their newest value.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import marshal
import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

Event = tuple[Any, ...]
Frame = Mapping[str, Any]

# Numbers that only grow -> what they are counted from, and the distance beyond which all are alike, by their name in
# the code under test. Epochs and ids are only ever compared, ticks and rows a little more.
COUNTED: dict[str, tuple[str, int]] = {
    **dict.fromkeys(
        ("epoch", "cancelled_epoch", "_cancelled_epoch", "_cancel_to_send", "forbidden_epoch"), ("epoch", 1)
    ),
    **dict.fromkeys(("consumed", "consumed_at", "base_step", "consumed_steps"), ("consumed", 9)),
    **dict.fromkeys(("held", "held_at"), ("held", 9)),
    **dict.fromkeys(("tick", "tick_count", "spoke"), ("tick", 2)),
    "played": ("played", 9),
    "_reported": ("reported", 9),
    "_player_consumed": ("reported", 9),
    "heard_consumed": ("reported", 9),
    **dict.fromkeys(("_latch", "player_latch"), ("latch", 1)),  # only ever compared with the newest
}
# Ids are taken by their order.
RANKED = frozenset({"chunk_id", "_chunk_id", "last_chunk_id"})
# Rows of a plan beyond its end and holds; more misses than the limit of any search.
CAPPED = {"_plan_row": 5, "misses_in_a_row": 2}
# Whether there is one matters and how many rows it has. The values are data: no branch depends on them as long as the
# limits are far, and the monitor compares them bit by bit where they are played.
SHAPES = frozenset({"_value", "_before", "said_values", "values", "actions", "committed"})
# Only reports ask which one it is.
TOLD = frozenset({"cause"})
# Read by reports only, or constant, or only for robots that are not searched (_kept).
IGNORED = frozenset(
    {
        "settings",
        "windows",
        "_age_last_s",
        "_stepped_mono_ns",
        "_last_consumed",
        "_counters",
        "_lock",
        "_kept",
        "stop_sent",
        "text",
        "now",
    }
    | {"submitted_ns", "sent_ns", "observation", "error", "_new", "message", "_accepted_at", "made_of"}
)
# Of these only some fields.
FIELDS = {
    "Counters": ("misses_in_a_row",),
    "Request": ("epoch", "chunk_id"),
    "Ask": ("epoch", "chunk_id"),
    "Answered": ("chunk",),
    "Chunk": ("epoch", "chunk_id"),
    "Lost": (),
}


class Violation(BaseException):
    """An invariant does not hold. ``name`` is one of invariants.NAMES.

    Not an Exception: the nodes turn those into a stop.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Model(Protocol):
    """What is searched."""

    @property
    def parts(self) -> list[Any]:
        """The objects whose attributes are the state, the same ones all along."""

    def frames(self) -> list[Frame]:
        """What the growing numbers of each part are counted from; ``given`` holds attributes that are canonical."""

    def events(self) -> list[Event]:
        """What may happen now."""

    def apply(self, event: Event) -> None:
        """Let it happen.

        :raises Violation: an invariant does not hold.
        """


def fork(value: Any) -> Any:
    """A copy that shares nothing that is ever written to."""
    kind = type(value)
    if not mutable(kind):
        return value
    if kind is dict:
        return {k: fork(v) for k, v in value.items()}
    if kind in (list, deque, set):
        return kind([fork(v) for v in value])
    copy = object.__new__(kind)
    for name in field_names(kind):
        object.__setattr__(copy, name, fork(getattr(value, name)))
    return copy


def changed(value: Any, copy: Any) -> bool:
    """True when what was forked as ``copy`` was written to since."""
    return mutable(type(value)) and value != copy


@functools.cache
def field_names(kind: type) -> tuple[str, ...]:
    """Names of a dataclass's fields."""
    return tuple(f.name for f in fields(kind))


@functools.cache
def mutable(kind: type) -> bool:
    """True for what must be copied before somebody else writes to it."""
    if is_dataclass(kind):
        return not kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return kind in (list, deque, set, dict)


class Canon:
    """Turns attributes into a comparable value.

    :param period_ns: the control period; clocks only move by it.
    :param age_max: ages beyond it are alike: longer than every limit [periods].
    """

    def __init__(self, period_ns: int, age_max: int) -> None:
        self._per_period, self._age_max = 100 / period_ns, 100 * age_max
        self._fields: dict[type, tuple[str, ...]] = {}

    def of(self, names: tuple[str, ...], values: Iterable[Any], frame: Frame) -> list[Any]:
        """``values``, as they are called in their owner."""
        out: list[Any] = []
        given = frame["given"]
        for name, value in zip(names, values, strict=True):
            kind = type(value)
            if value is None or kind is bool or kind is str:
                out.append(value)
            elif name in given:
                out.append(given[name])
            elif name in SHAPES:
                out.append(len(value) if hasattr(value, "__len__") else True)
            elif kind is int:
                out.append(self._number(name, value, frame))
            else:
                out.append(self._other(name, kind, value, frame))
        return out

    def _number(self, name: str, value: int, frame: Frame) -> int | None:
        if name in COUNTED:
            base, far = COUNTED[name]
            if isinstance(frame[base], list):
                return len(frame[base]) - bisect_right(frame[base], value)
            distance: int = frame[base] - value
            return far if distance > far else max(distance, -far)
        if name in RANKED:
            return len(frame["ids"]) - bisect_right(frame["ids"], value)
        if name.endswith("_ns"):
            age = round((frame["now_ns"] - value) * self._per_period)
            return min(age, self._age_max) if value else None
        return min(value, CAPPED[name]) if name in CAPPED else value

    def _other(self, name: str, kind: type, value: Any, frame: Frame) -> Any:
        if kind is float:
            return round(value, 5) + 0.0
        if kind is np.ndarray:
            return [round(v, 5) + 0.0 for v in value.ravel().tolist()]
        if kind is tuple or kind is list or kind is deque:
            return self.of((name,) * len(value), value, frame)
        names = self._fields.get(kind)
        if names is None:
            known = field_names(kind) if is_dataclass(kind) else ()
            names = FIELDS.get(kind.__name__, tuple(n for n in known if n not in IGNORED))
            self._fields[kind] = names
        if names or kind.__name__ in FIELDS:
            return (kind.__name__, self.of(names, [getattr(value, n) for n in names], frame))
        if isinstance(value, Exception):
            return kind.__name__
        if not isinstance(value, enum.Enum):
            raise TypeError(f"{name} is a {kind.__name__}: the search cannot tell two of them apart")
        return bool(value.value) if name in TOLD else value.value


@dataclass(frozen=True)
class Found:
    """What a search saw.

    :param depth: events from the start to the farthest state. :param violation: None when every invariant held.
    :param trace: the shortest events that lead to the violation.
    :param complete: False when the search ended before every state was visited.
    :param events: how often each happened. :param seen: what the model noted on the way.
    """

    states: int
    transitions: int
    depth: int
    seconds: float
    complete: bool
    events: Mapping[str, int]
    seen: frozenset[Any]
    violation: Violation | None = None
    trace: tuple[Event, ...] = ()

    def __str__(self) -> str:
        text = f"{self.states} states, {self.transitions} transitions, depth {self.depth}, {self.seconds:.1f} s"
        if self.violation is None:
            return text if self.complete else f"{text}, NOT complete"
        return f"{text}\n{self.violation}\nafter {len(self.trace)} events: {' '.join(map(name_of, self.trace))}"


def name_of(event: Event) -> str:
    """An event in one word."""
    return ":".join(str(part) for part in event)


def unmoved(own: dict[str, Any], before: dict[str, Any], names: tuple[str, ...]) -> bool:
    """True when every attribute is the object it was, or a copy that nobody wrote to."""
    for name in names:
        value = own[name]
        if value is not before[name] and (not mutable(type(value)) or value != before[name]):
            return False
    return True


def digest(state: Saved) -> bytes:
    """Sixteen bytes that stand for a state."""
    # Version 2: later ones write an object that stands twice as a reference, so that equal values have other bytes.
    return blake2b(marshal.dumps(state.keys, 2), digest_size=16).digest()


@dataclass(slots=True)
class Saved:
    """One state: attributes and canonical form of every part, and the frames it was taken in."""

    attributes: list[dict[str, Any]]
    keys: list[Any]
    frames: list[Frame]


class Search:
    """One breadth-first search.

    :param age_max: longer than every limit [periods].
    :param states_max: the search gives up beyond it: a number that only grows is missing in COUNTED.
    """

    def __init__(self, model: Model, period_ns: int, *, age_max: int = 9, states_max: int = 5_000_000) -> None:
        self._model, self._canon, self._states_max = model, Canon(period_ns, age_max), states_max
        self._parents: list[tuple[int, Event]] = [(0, ())]
        self._counts: dict[str, int] = {}
        self._constants = self._walk()
        self._names = [
            tuple(n for n in vars(part) if n not in IGNORED and n not in constants)
            for part, constants in zip(model.parts, self._constants, strict=True)
        ]

    def run(self) -> Found:
        """Visit every state, or stop at the first violation."""
        began = time.perf_counter()
        start = self._save(None)
        seen = {digest(start)}
        level: list[tuple[int, Saved]] = [(0, start)]
        transitions = depth = 0
        while level:
            following: list[tuple[int, Saved]] = []
            for index, saved, event in self._transitions(level):
                transitions += 1
                try:
                    self._model.apply(event)
                except Violation as violation:
                    return self._found(began, transitions, depth + 1, violation, self._trace(index, event))
                state = self._save(saved)
                if state is saved or (number := digest(state)) in seen:
                    continue
                seen.add(number)
                state.attributes = [vars(part).copy() for part in self._model.parts]
                self._check_constants()
                following.append((len(self._parents), state))
                self._parents.append((index, event))
            if len(seen) > self._states_max:
                return self._found(began, transitions, depth + 1)
            level = following
            depth += bool(level)
        return self._found(began, transitions, depth, complete=True)

    def _walk(self) -> list[dict[str, Any]]:
        """Attributes that stay one object on walks at random: constants. Ends where it began."""
        chance, parts = random.Random(1), self._model.parts
        plain = (int, float, str, tuple, list, np.ndarray, type(None))
        start, clean = [vars(part).copy() for part in parts], [fork(vars(part)) for part in parts]
        constants = [{n: v for n, v in own.items() if not isinstance(v, plain)} for own in start]
        for _ in range(40):
            for part, own in zip(parts, start, strict=True):
                part.__dict__ = {n: v if type(v) is dict else fork(v) for n, v in own.items()}
            for _ in range(60):
                with contextlib.suppress(Violation):
                    self._model.apply(chance.choice(self._model.events()))
                for part, own, constant in zip(parts, clean, constants, strict=True):
                    now = vars(part)
                    for name in [n for n, v in constant.items() if now[n] is not v or changed(v, own[n])]:
                        del constant[name]
        for part, own, constant in zip(parts, clean, constants, strict=True):
            part.__dict__ = {**own, **constant}
        return constants

    def _check_constants(self) -> None:
        for part, constants in zip(self._model.parts, self._constants, strict=True):
            own = vars(part)
            changed = [name for name, value in constants.items() if own[name] is not value]
            if changed:
                raise TypeError(f"{changed} of {type(part).__name__} was taken for constant: walk longer")

    def _transitions(self, level: list[tuple[int, Saved]]) -> Iterator[tuple[int, Saved, Event]]:
        for index, saved in level:
            self._restore(saved.attributes)
            for event in self._model.events():
                self._counts[event[0]] = self._counts.get(event[0], 0) + 1
                self._restore(saved.attributes)
                yield index, saved, event

    def _restore(self, attributes: list[dict[str, Any]]) -> None:
        for part, saved, constants in zip(self._model.parts, attributes, self._constants, strict=True):
            own = {**saved, **constants}
            for name, value in saved.items():
                if mutable(type(value)) and name not in IGNORED and name not in constants:
                    own[name] = fork(value)
            part.__dict__ = own

    def _save(self, before: Saved | None) -> Saved:
        """The state now, which is ``before`` where nothing has changed. The attributes are still the model's own."""
        frames = self._model.frames()
        keys, moved = [], False
        for i, (part, names) in enumerate(zip(self._model.parts, self._names, strict=True)):
            own = vars(part)
            if before is not None and frames[i] == before.frames[i] and unmoved(own, before.attributes[i], names):
                keys.append(before.keys[i])
            else:
                moved = True
                keys.append(self._canon.of(names, [own[n] for n in names], frames[i]))
        if before is not None and not moved:
            return before
        return Saved([vars(part) for part in self._model.parts], keys, frames)

    def _trace(self, index: int, event: Event) -> tuple[Event, ...]:
        events = [event]
        while index:
            index, event = self._parents[index]
            events.append(event)
        return tuple(reversed(events))

    def _found(
        self,
        began: float,
        transitions: int,
        depth: int,
        violation: Violation | None = None,
        trace: tuple[Event, ...] = (),
        *,
        complete: bool = False,
    ) -> Found:
        seconds = time.perf_counter() - began
        seen = frozenset(getattr(self._model, "seen", ()))
        return Found(len(self._parents), transitions, depth, seconds, complete, self._counts, seen, violation, trace)
