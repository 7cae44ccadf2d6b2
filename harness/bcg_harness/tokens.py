"""Where the token ids of the cases come from: random numbers, or a text."""

from typing import Protocol

import torch

from bcg_harness.errors import HarnessError

_STRIDE = 97
"""Tokens between the starts of two sequences in a text, so that no two read alike."""


class TokenSource(Protocol):
    """Give each sequence number its tokens: the same in every case, so that one reference serves all of them."""

    def tokens(self, sequence: int, length: int) -> list[int]:
        """Return the first ``length`` token ids of ``sequence``; a shorter request is a prefix of a longer one."""


class RandomTokens(TokenSource):
    """Draw token ids uniformly; a pure function of seed and sequence number."""

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def tokens(self, sequence: int, length: int) -> list[int]:
        """Return the first ``length`` token ids of ``sequence``."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + sequence) % 2**63)
        # Element by element, so that a longer draw starts like a shorter one.
        drawn = torch.rand(length, generator=generator, dtype=torch.float64)
        return (drawn * self._vocab_size).long().tolist()


class TextTokens(TokenSource):
    """Cut sequences out of a tokenised text, each from another place, repeating the text as needed."""

    def __init__(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise HarnessError("the text has no tokens: give a file with some text in it")
        self._ids = token_ids

    def tokens(self, sequence: int, length: int) -> list[int]:
        """Return the first ``length`` token ids of ``sequence``."""
        start = sequence * _STRIDE % len(self._ids)
        repeats = -(-(start + length) // len(self._ids))
        return (self._ids * repeats)[start : start + length]
