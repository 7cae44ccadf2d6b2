"""Prefills that fail are counted by type and place, and those that succeed as before."""

from collections.abc import Callable
from typing import Any

import pytest

from bcg_core import BatchError, Mode, TokenBuckets

Make = Callable[..., Any]


class MistakeError(Exception):
    """What user code raises here."""


def fail(*arguments: Any) -> Any:
    raise MistakeError


IN_FORWARD = {
    Mode.BREAKABLE: "MistakeError in replay",
    Mode.PADDED_EAGER: "MistakeError in eager",
    Mode.EAGER: "MistakeError in eager",
}


@pytest.mark.parametrize(("mode", "key"), IN_FORWARD.items(), ids=lambda each: str(each))
def test_a_failure_of_a_backend_is_counted_where_it_was(
    make_runner: Make, make_batch: Make, mode: Mode, key: str
) -> None:
    runner = make_runner()
    runner.backend.before_forward = fail
    for count in (1, 2):
        with pytest.raises(MistakeError):
            runner.prefill(make_batch(3), mode=mode)
        assert runner.stats.failures == {key: count}
    assert runner.stats.replays == runner.stats.fallbacks == runner.stats.requested == {}


def test_a_failure_of_a_sampler_belongs_to_the_forward_before_it(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    with pytest.raises(MistakeError):
        runner.prefill(make_batch(3), sample=fail)
    assert runner.stats.failures == {"MistakeError in replay": 1}


def test_a_failure_while_preparing_is_counted_before_the_forward(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    runner.prefill(make_batch(3))
    runner.backend.init_forward_metadata = fail
    with pytest.raises(MistakeError):
        runner.prefill(make_batch(3))
    assert runner.stats.failures == {"MistakeError before the forward": 1}


def test_a_refused_batch_is_counted(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    with pytest.raises(BatchError):
        runner.prefill(make_batch(*[1] * 9))
    assert runner.stats.failures == {"BatchError before the forward": 1}


def test_an_interrupt_is_counted(make_runner: Make, make_batch: Make) -> None:
    def interrupt(layer: int) -> None:
        raise KeyboardInterrupt

    runner = make_runner()
    runner.backend.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        runner.prefill(make_batch(3))
    assert runner.stats.failures == {"KeyboardInterrupt in replay": 1}


def test_what_succeeds_is_no_failure(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    for mode in Mode:
        runner.prefill(make_batch(3), mode=mode)
    assert runner.stats.failures == {}
    assert runner.stats.replays == {8: 1}


# Admission


@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 16, 17], ids=str)
def test_an_admission_is_made_once(tokens: int) -> None:
    buckets = TokenBuckets([8, 16])
    assert buckets.select(tokens) is buckets.select(tokens)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not_captured"])
def test_a_runner_makes_nothing_to_admit_a_batch(
    make_runner: Make, make_batch: Make, captured: bool
) -> None:
    runner, batch = make_runner(captured=captured), make_batch(3)
    assert runner.admit(batch) is runner.admit(batch)
