"""The agent's text as tokens: its UTF-8 bytes and an end mark, with the log-probabilities that it was sampled with.

The agent draws one of a few whole turns. As a language model over bytes that is exact: the probability of the next
byte is the mass of the turns that go on with it, divided by the mass of those that fit so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

END_OF_TURN = 256


def encode(text: str) -> list[int]:
    """The bytes of `text`, without an end mark."""
    return list(text.encode())


def turn_logprobs(chosen: Sequence[int], turns: Sequence[tuple[Sequence[int], float]]) -> np.ndarray[Any, Any]:
    """Log-probability (nats, float32) of each token of `chosen` among `turns` of (tokens, probability).

    They sum to the logarithm of the probability of `chosen`. It must be one of `turns`.
    """
    fitting = list(turns)
    logprobs = np.zeros(len(chosen), np.float32)
    for at, token in enumerate(chosen):
        if len(fitting) == 1:
            break  # from here on nothing else can come
        going_on = [turn for turn in fitting if len(turn[0]) > at and turn[0][at] == token]
        if len(going_on) < len(fitting):
            mass, before = sum(p for _, p in going_on), sum(p for _, p in fitting)
            logprobs[at] = np.log(mass / before)
        fitting = going_on
    return logprobs
