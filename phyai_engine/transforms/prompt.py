"""Instruction (and for pi0.5 the state) -> token ids.

| form       | text, after BOS                                                                                    |
|------------|----------------------------------------------------------------------------------------------------|
| plain      | the cleaned instruction, then a line end as a token of its own: openpi's pi0, and its pi0.5 where  |
|            | the state is no part of the prompt                                                                 |
| verbatim   | the instruction as it is, with a line end unless it ends in one: lerobot's pi0                     |
| state_bins | ``Task: INSTRUCTION, State: BINS;`` line end ``Action: ``, cleaned: pi0.5 of both                  |

With ``plain`` a model that takes no state vector does not see the state at all (openpi's pi05_libero): that is allowed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import PromptConfig
from phyai_engine.transforms import state as states
from phyai_engine.transforms.normalise import Floats
from phyai_engine.transforms.tokenizer import Tokenizer, tokenizer_from


class Prompt:
    """A model file's prompt. Not for concurrent calls.

    :param size: P, tokens of the model's input. :param state_width: of the padded state, for ``padded_state``.
    :raises ConfigError: of the tokenizer.
    """

    def __init__(self, config: PromptConfig, size: int, state_width: int) -> None:
        self.tokenizer: Tokenizer = tokenizer_from(config.tokenizer)
        self._config = config
        self._size = size
        self._state_width = state_width
        self._longest_cut = 0

    def __call__(self, instruction: str, state: Floats) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Padded on the right; what exceeds ``max_tokens`` is cut on the right, with a warning.

        The warning comes once, and again only for a longer prompt than any before: a request every 100 ms must not
        fill the log.

        :param state: [n], normalised, not padded. :returns: ids [P] int64 and validity [P] bool.
        """
        ids, limit = self.ids(instruction, state), self._config.max_tokens
        if len(ids) > limit:
            if len(ids) > self._longest_cut:
                self._longest_cut = len(ids)
                warnings.warn(
                    f"the prompt has {len(ids)} tokens and is cut to {limit}: its end is lost. "
                    "Shorten the instruction or raise prompt.max_tokens.",
                    UserWarning,
                    stacklevel=2,
                )
            ids = ids[:limit]
        tokens = np.full(self._size, self.tokenizer.pad, dtype=np.int64)
        tokens[: len(ids)] = ids
        return tokens, np.arange(self._size) < len(ids)

    def ids(self, instruction: str, state: Floats) -> list[int]:
        """All token ids of the prompt, BOS first."""
        encode, form = self.tokenizer.encode, self._config.form
        if form == "plain":
            rest = [*encode(clean(instruction)), *encode("\n")]
        elif form == "verbatim":
            rest = encode(instruction if instruction.endswith("\n") else f"{instruction}\n")
        else:
            shown = states.pad(state, self._state_width) if self._config.padded_state else state
            rest = encode(with_state(instruction, states.bins(shown)))
        return [self.tokenizer.bos, *rest]


def clean(instruction: str) -> str:
    """Strip, then underscores and line ends to spaces; case is kept."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def with_state(instruction: str, bins: Sequence[int]) -> str:
    """The text of ``state_bins``. The blank after "Action:" belongs to it."""
    return f"Task: {clean(instruction)}, State: {' '.join(str(b) for b in bins)};\nAction: "
