"""Reads an iterator in a thread of its own, some items ahead, so that unpacking a chunk makes nobody wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

JOIN_S = 5.0


class ReadAhead(Generic[T]):
    """The items of ``source`` in their order; what it raises is raised where it would have come.

    Use it as a context: leaving it ends the thread, also in the middle.

    :param depth: most items that are held.
    """

    def __init__(self, source: Iterator[T], depth: int = 64) -> None:
        self._source = source
        self._items: queue.Queue[T | _End] = queue.Queue(depth)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phyai-read-ahead", daemon=True)
        self._thread.start()

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    def _run(self) -> None:
        end = _End(None)
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except Exception as error:
            end = _End(error)
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        """False where nobody will take it any more."""
        while not self._ended.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


class _End:
    """Follows the last item. :param error: why it is the last."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
