"""What tests of the soak share."""

from collections.abc import Callable
from typing import Any

import pytest

from bcg_core import AttentionBackend
from bcg_harness import Candidate, RandomTokens
from bcg_harness.fuzz.draw import Bounds
from bcg_harness.soak.soak import Soak
from bcg_harness.soak.traffic import Traffic
from bcg_llama import LlamaModel

BOUNDS = Bounds(most_requests=3, most_context=24)


@pytest.fixture(scope="module")
def make_soak(small_model: LlamaModel) -> Callable[..., Soak]:
    """Return a function that makes a short soak on the small model."""

    def make(*backends: type[AttentionBackend], **arguments: Any) -> Soak:
        given: dict[str, Any] = {
            "model": small_model,
            "traffic": Traffic(seed=0, buckets=(4, 8), bounds=BOUNDS),
            "candidates": [Candidate(name=each.name, backend=each) for each in backends],
            "source": RandomTokens(small_model.spec.vocab_size),
            "replays": 200,
            "samples": 20,
            "check_every": 20,
            "page_size": 4,
        }
        return Soak(**given | arguments)

    return make
