"""Full graphs are captured where a backend declares them, once, and only while it is that backend's turn."""

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
def check(small_model: LlamaModel) -> Check:
    """Return a function that checks full graphs of a backend, all in one matrix."""
    matrix = Matrix(
        small_model,
        CASES,
        BUCKETS,
        RandomTokens(small_model.spec.vocab_size),
        checks=["full_graph"],
    )
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
    assert sorted(runner.graphs) == sorted(BUCKETS)
    assert sum(runner.stats.replays.values()) == sum(
        step.checked for case in CASES for step in case.steps
    )


def test_graphs_are_released_when_the_next_backend_is_checked(
    check: Check, runners: list[PrefillRunner]
) -> None:
    check(MaskBackend)
    check(WithBreaks)
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
