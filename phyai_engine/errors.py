"""The one error tree.

    PhyaiError
    ├── ConfigError          a file or parameter a person wrote is wrong
    ├── BagError             a bag cannot be read, or does not hold what the robot needs
    ├── ImageError           an image message cannot be decoded
    ├── RefusalError         an observation or chunk is refused; carries a Refusal code
    ├── WeightsError         a checkpoint does not hold what the model needs
    ├── ProtocolError        bytes on a socket do not follow serve/protocol.py
    │   └── KeyframeError         a request refers to content that the engine does not hold
    └── EngineError          the engine could not answer
        ├── EngineRefusedError    the handshake was refused; the reason says why
        ├── EngineTimeoutError    no answer within the bound
        ├── EngineDiedError       the engine process ended
        └── CancelledError        the request was cancelled; never reported as OK

Every message says what, got, wanted, where, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy: the command line does without
    from phyai_engine.types import Refusal


class PhyaiError(Exception):
    """Base of all errors. Parts that are not given are left out of the message.

    :param what: what is wrong, a short clause.
    :param got: the value found.
    :param wanted: the value or form expected.
    :param where: file, key path, topic or tensor.
    :param do: what the reader should do next.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        wanted: object = None,
        where: object = None,
        do: str | None = None,
    ) -> None:
        self.what, self.got, self.wanted, self.where, self.do = (
            what,
            got,
            wanted,
            where,
            do,
        )
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if wanted is not None:
            parts.append(f"wanted {wanted}")
        if where is not None:
            parts.append(f"at {where}")
        text = ", ".join(parts)
        super().__init__(f"{text}. {do}" if do else text)


class ConfigError(PhyaiError):
    """A configuration file or parameter is wrong."""


class BagError(PhyaiError):
    """A bag cannot be read, or does not hold what the robot needs."""


class ImageError(PhyaiError):
    """An image message cannot be decoded."""


class RefusalError(PhyaiError):
    """An observation or an action chunk is refused as a whole.

    :param code: the reason, one of :class:`phyai_engine.types.Refusal`.
    """

    def __init__(
        self,
        code: Refusal,
        what: str,
        *,
        got: object = None,
        wanted: object = None,
        where: object = None,
        do: str | None = None,
    ) -> None:
        self.code = code
        super().__init__(f"{code.name.lower()}: {what}", got=got, wanted=wanted, where=where, do=do)


class WeightsError(PhyaiError):
    """A checkpoint does not hold what the model needs."""


class ProtocolError(PhyaiError):
    """A message does not follow the engine protocol."""


class KeyframeError(ProtocolError):
    """A request refers to content that the engine does not hold: it is to be sent again, whole."""


class EngineError(PhyaiError):
    """The engine could not answer a request."""


class EngineRefusedError(EngineError):
    """The engine refused the handshake."""


class EngineTimeoutError(EngineError):
    """The engine did not answer within the bound."""


class EngineDiedError(EngineError):
    """The engine process ended."""


class CancelledError(EngineError):
    """The request was cancelled before it finished."""
