"""Which token counts are captured, and which of them serves a batch."""

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcg_core.errors import BucketError


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Say what serves a batch: the replay of a bucket, or eager prefill for a reason.

    Attributes:
        bucket: T, the padded token count to replay; None for eager.
        reason: why it is eager; None when a bucket serves it.
    """

    bucket: int | None
    reason: str | None

    @classmethod
    def replay(cls, bucket: int) -> "Admission":
        """Admit to the replay of ``bucket``."""
        return cls(bucket=bucket, reason=None)

    @classmethod
    def eager(cls, reason: str) -> "Admission":
        """Leave to eager prefill because of ``reason``."""
        return cls(bucket=None, reason=reason)


class TokenBuckets(Sequence[int]):
    """Hold the token counts that are captured, in ascending order.

    Raises BucketError for an empty ladder and for sizes that are not positive, not ascending or repeated.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = tuple(sizes)
        if not self._sizes:
            raise BucketError("a bucket ladder needs at least one size")
        for size in self._sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise BucketError(f"bucket {size!r} is no positive number of tokens")
        for smaller, larger in zip(self._sizes, self._sizes[1:], strict=False):
            if smaller >= larger:
                what = "is there twice" if smaller == larger else f"stands after {smaller}"
                raise BucketError(
                    f"bucket {larger} {what}: give sizes in ascending order, each once, for example "
                    f"{sorted(set(self._sizes))}"
                )
        # Made once: a prefill asks each time.
        self._replays = tuple(Admission.replay(size) for size in self._sizes)
        self._beyond = Admission.eager(f"more tokens than the largest bucket ({self._sizes[-1]})")

    @classmethod
    def ladder(
        cls, max_tokens: int, *, min_tokens: int = 8, sizes_per_octave: int = 8
    ) -> "TokenBuckets":
        """Return the default ladder up to ``max_tokens``, which is always the largest bucket.

        Steps grow with the size, ``sizes_per_octave`` to each doubling and none smaller than ``min_tokens``. Beyond
        ``min_tokens * sizes_per_octave`` tokens a batch is padded by less than one part in ``sizes_per_octave``.
        """
        if max_tokens < 1 or min_tokens < 1 or sizes_per_octave < 1:
            raise BucketError(
                f"a ladder needs positive numbers, got max_tokens={max_tokens}, min_tokens={min_tokens}, "
                f"sizes_per_octave={sizes_per_octave}"
            )
        sizes: list[int] = []
        size = step = min_tokens
        while size < max_tokens:
            sizes.append(size)
            if size >= 2 * step * sizes_per_octave:
                step *= 2
            size += step
        return cls([*sizes, max_tokens])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TokenBuckets":
        """Read a ladder from a JSON file, ``{"buckets": [16, 64]}``; other keys are for people and left alone.

        Raises BucketError, which names the file, for one that cannot be read or holds no ladder.
        """
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BucketError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BucketError(f"{path} is no JSON: {error}") from error
        sizes = raw.get("buckets") if isinstance(raw, dict) else None
        if not isinstance(sizes, list):
            raise BucketError(f'{path} holds no ladder: expected {{"buckets": [16, 64, 256]}}')
        try:
            return cls(sizes)
        except BucketError as error:
            raise BucketError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None) -> None:
        """Write the ladder to a JSON file that ``load`` reads.

        Args:
            path: is replaced when it exists.
            about: where the ladder comes from, for people; anything that JSON can hold.

        Raises BucketError, which names the file, where it cannot be written.
        """
        content = {"buckets": list(self), **({} if about is None else {"about": about})}
        text = json.dumps(content, indent=1, allow_nan=False)
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise BucketError(f"cannot write {path}: {error.strerror}") from error

    def select(self, tokens: int) -> Admission:
        """Admit ``tokens`` real tokens to the smallest bucket that holds them, or to eager prefill."""
        if tokens > self._sizes[-1]:
            return self._beyond
        return self._replays[bisect_left(self._sizes, tokens)]

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int and slice overloads of Sequence
        return self._sizes[index]

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __repr__(self) -> str:
        return f"TokenBuckets({list(self._sizes)})"
