"""What tests of random compositions share."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from bcg_backends.sdpa import SDPABackend
from bcg_core import AttentionBackend
from bcg_harness import Candidate, RandomTokens
from bcg_harness.checks import MECHANISM
from bcg_harness.fuzz.draw import Bounds
from bcg_harness.fuzz.fuzz import Fuzz
from bcg_harness.fuzz.plan import Plan
from bcg_harness.testing import MaskBackend
from bcg_llama import LlamaModel

SDPA = Candidate(name="sdpa", backend=SDPABackend)
MASK = Candidate(name="mask", backend=MaskBackend)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Leave torch out of garbage collections, of which every capture makes one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def make_fuzz(small_model: LlamaModel) -> Callable[..., Fuzz]:
    """Return a function that makes a run of random compositions on the small model."""

    def make(
        *backends: type[AttentionBackend],
        seed: int = 1,
        cases: int = 40,
        bounds: Bounds | None = None,
        checks: Sequence[str] = MECHANISM,
        **arguments: Any,
    ) -> Fuzz:
        return Fuzz(
            small_model,
            Plan(seed=seed, cases=cases, bounds=bounds or Bounds(most_bucket=16)),
            [Candidate(name=backend.name, backend=backend) for backend in backends],
            RandomTokens(small_model.spec.vocab_size),
            checks=checks,
            **arguments,
        )

    return make
