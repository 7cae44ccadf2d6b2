"""Full graphs are captured where a backend declares them, once, and kept until its cases are done."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bcg_core import AttentionBackend, PrefillRunner, TokenBuckets
from bcg_harness import CheckResult, Matrix, Outcome, RandomTokens, builtin_cases, full_graph
from bcg_harness.testing import MaskBackend
from bcg_llama import LlamaModel

BUCKETS = TokenBuckets([8, 32])
CASES = [case for case in builtin_cases(BUCKETS) if case.name in ("one-request", "two-chunks")]

Check = Callable[[type[AttentionBackend]], list[CheckResult]]


class Narrow(MaskBackend):
    """Declare full graphs, and refuse those of this spec."""

    name = "narrow"

    def refuse_full_graph(self) -> str | None:
        """Name the limit."""
        return "head_dims: full graphs need 256"


class Another(MaskBackend):
    """Be the same under another name."""

    name = "another"


class WithBreaks(MaskBackend):
    """Declare no full graphs."""

    name = "with-breaks"
    capabilities = replace(MaskBackend.capabilities, supports_full_graph=False)


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[PrefillRunner]:
    """Return the runners that are made for full graphs, as they are made."""
    made: list[PrefillRunner] = []

    class Noted(PrefillRunner):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(full_graph, "PrefillRunner", Noted)
    return made


@pytest.fixture
def matrix(small_model: LlamaModel) -> Matrix:
    """Return a matrix that checks full graphs alone."""
    return Matrix(
        small_model,
        CASES,
        BUCKETS,
        RandomTokens(small_model.spec.vocab_size),
        checks=["full_graph"],
    )


@pytest.fixture
def check(matrix: Matrix) -> Check:
    """Return a function that checks full graphs of a backend, all in one matrix."""
    return lambda backend: matrix.check(backend.name, backend)


def test_a_right_backend_passes_in_every_step(check: Check) -> None:
    results = check(MaskBackend)
    assert {result.check for result in results} == {"full_graph"}
    assert {result.outcome for result in results} == {Outcome.PASSED}


def test_a_backend_that_declares_none_is_not_checked(
    check: Check, runners: list[PrefillRunner]
) -> None:
    assert check(WithBreaks) == []
    assert runners == []


def test_a_refusal_is_a_skip_by_declaration_that_gives_the_reason(check: Check) -> None:
    found = {(result.outcome, result.declared, result.detail) for result in check(Narrow)}
    assert found == {(Outcome.SKIPPED, True, "head_dims: full graphs need 256")}


def test_graphs_are_captured_once_for_all_cases(check: Check, runners: list[PrefillRunner]) -> None:
    check(MaskBackend)
    (runner,) = runners
    assert sum(runner.stats.replays.values()) == sum(
        step.checked for case in CASES for step in case.steps
    )


def test_backends_that_take_turns_are_captured_once_each(
    matrix: Matrix, runners: list[PrefillRunner]
) -> None:
    turns = [matrix.each_case(each.name, each) for each in (MaskBackend, Another)]
    rounds = list(zip(*turns, strict=True))
    assert len(rounds) == len(CASES)
    assert [runner.backend.name for runner in runners] == ["mask", "another"]


def test_graphs_are_kept_while_there_are_more_cases(
    matrix: Matrix, runners: list[PrefillRunner]
) -> None:
    turn = matrix.each_case("mask", MaskBackend)
    next(turn)
    assert sorted(runners[0].graphs) == sorted(BUCKETS)


def test_graphs_are_released_behind_the_last_case(
    check: Check, runners: list[PrefillRunner]
) -> None:
    check(MaskBackend)
    assert runners[0].graphs == {}


def test_graphs_are_released_when_nobody_asks_for_more_cases(
    matrix: Matrix, runners: list[PrefillRunner]
) -> None:
    turn = matrix.each_case("mask", MaskBackend)
    next(turn)
    turn.close()  # type: ignore[attr-defined]  # it is a generator
    assert runners[0].graphs == {}


def test_the_instance_is_not_the_one_that_runs_with_breaks(
    check: Check, runners: list[PrefillRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[AttentionBackend] = []
    before = MaskBackend.__init__

    def noting(self: MaskBackend, *args: object, **kwargs: object) -> None:
        before(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(MaskBackend, "__init__", noting)
    check(MaskBackend)
    assert [backend is runners[0].backend for backend in made] == [False, True]
