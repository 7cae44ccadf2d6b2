"""Random operations on a runner and its cache agree with the model in plain Python, and the model finds faults.

``BCG_SEQUENCES`` sets how many sequences are tried; 300 without it.
"""

import json
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bcg_core.page_holders import PageHolders

SCRIPT = Path(__file__).with_name("operation_sequences.py")


def test_random_operations_agree_with_the_model() -> None:
    # In a process of its own, so that the state of torch that it changes is nobody else's.
    command = [sys.executable, str(SCRIPT), os.environ.get("BCG_SEQUENCES", "300")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads(done.stdout)
    assert record["failure"] is None
    assert {"fork", "free", "two_threads", "under_ambient_state"} <= set(record["operations"])
    assert set(record["replays"]) == {"4", "16"}


def no_tails_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcg_core.runner.clear_tails", lambda batch: None)


def nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcg_core.kv_cache.PagedKVCache.copy_pages", lambda self, copies: None)


def shared_pages_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageHolders, "unshare", lambda self, sequence, first, stop: [])


def failures_count_as_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def prefilling(batch: Any) -> Iterator[None]:
        try:
            yield
        finally:
            for sequence, length in zip(batch.sequences, batch.kv_lens, strict=True):
                sequence._written = sequence._cached = length

    monkeypatch.setattr("bcg_core.runner.Prefilling", prefilling)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_tails_are_cleared,
    nothing_is_copied,
    shared_pages_are_written,
    failures_count_as_cached,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    world = runpy.run_path(str(SCRIPT))["World"](
        seed=0, device="cpu", dtype=torch.float32, backends=["sdpa"], page_size=4
    )

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(100):
                world.sequence(12)

    with pytest.raises((AssertionError, ValueError)):
        run()
