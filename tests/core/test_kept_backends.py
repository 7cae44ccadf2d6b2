"""Backends that a runner keeps: made and warmed up once for a name and its options, and not too many."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bcg_core import BackendRegistry, CaptureError, PrefillRunner, UnknownBackendError
from bcg_core.kept_backends import recipe_of
from bcg_harness.testing import MaskBackend

Make = Callable[..., Any]


@pytest.fixture
def made(
    monkeypatch: pytest.MonkeyPatch, toy_backend: type[Any], make_backend: Make
) -> list[tuple[str, dict[str, Any]]]:
    """Register any name as a toy that takes any option; return what is made of which, as it happens."""
    made: list[tuple[str, dict[str, Any]]] = []

    def create(self: Any, name: str, *rest: Any, **options: Any) -> Any:
        if name == "unknown":
            raise UnknownBackendError(name, "only a test")
        made.append((name, options))
        return make_backend()

    monkeypatch.setattr(BackendRegistry, "create", create)
    return made


# The same backend again


def test_switching_to_and_fro_by_name_makes_and_warms_up_each_backend_once(
    make_runner: Make, made: list[Any]
) -> None:
    runner = make_runner()
    first = {name: runner.use_backend(name) for name in ("one", "two")}
    seen = {name: len(backend.seen) for name, backend in first.items()}
    for _ in range(3):
        for name, backend in first.items():
            assert runner.use_backend(name) is backend
    assert [name for name, _ in made] == ["one", "two"]
    assert {name: len(backend.seen) for name, backend in first.items()} == seen


def test_a_runner_that_makes_a_backend_at_every_switch_is_found(
    make_runner: Make, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg_core.runner.recipe_of", lambda name, options: object())
    runner = make_runner()
    for _ in range(3):
        runner.use_backend("one")
    assert len(made) == 3
    assert len(runner.kept_backends) == 4


def test_the_backend_that_a_runner_was_made_with_is_found_by_its_name(
    kv_cache: Any, toy_model: Make, make_backend: Make, made: list[Any]
) -> None:
    runner = PrefillRunner(
        toy_model(), kv_cache, "one", backend_options={"splits": 2}, buckets=[8], max_requests=8
    )
    backend = runner.backend
    runner.use_backend(make_backend())
    assert runner.use_backend("one", splits=2) is backend


def test_a_backend_that_is_given_is_not_found_by_its_name(
    make_runner: Make, made: list[Any]
) -> None:
    runner = make_runner()  # of a backend called "toy"
    assert runner.use_backend("toy") is not make_runner().backend
    assert made == [("toy", {})]


def test_a_backend_found_by_name_may_be_given_too(
    make_runner: Make, make_backend: Make, made: list[Any]
) -> None:
    runner = make_runner()
    backend = runner.use_backend("one")
    runner.use_backend(make_backend())
    assert runner.use_backend(backend) is backend
    runner.use_backend(make_backend())
    assert runner.use_backend("one") is backend


def test_the_backend_of_full_graphs_may_be_asked_for_by_its_name(
    kv_cache: Any, toy_model: Make, make_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        BackendRegistry, "create", lambda self, name, *rest, **options: make_backend(MaskBackend)
    )
    runner = PrefillRunner(
        toy_model(), kv_cache, "one", buckets=[8], max_requests=8, full_graph=True
    )
    runner.capture()
    assert runner.use_backend("one") is runner.backend
    with pytest.raises(CaptureError, match=r"call release\(\), switch, then capture again"):
        runner.use_backend("two")


def test_a_kept_backend_is_warmed_up_again_after_release(
    make_runner: Make, made: list[Any]
) -> None:
    runner = make_runner()
    backend = runner.use_backend("one")
    runner.release()
    backend.seen.clear()
    runner.capture()
    assert len(backend.seen) == 2 * 2  # buckets, each without and behind a prefix


def test_a_backend_that_fails_to_warm_up_is_not_kept(
    make_runner: Make, made: list[Any], monkeypatch: pytest.MonkeyPatch, toy_backend: type[Any]
) -> None:
    def fail(self: Any, *arguments: Any) -> None:
        raise ArithmeticError("no kernel")

    runner = make_runner()
    with monkeypatch.context() as patch:
        patch.setattr(toy_backend, "warm_up", fail)
        with pytest.raises(ArithmeticError):
            runner.use_backend("one")
    runner.use_backend("one")
    assert len(made) == 2
    assert len(runner.kept_backends) == 2


OTHERWISE: dict[str, tuple[Any, Any]] = {
    "number": (1, 2),
    "number_and_bool": (1, True),
    "number_and_float": (1, 1.0),
    "list": ([1, 2], [2, 1]),
    "list_and_tuple": ([1, 2], (1, 2)),
    "nested": ([{"a": {1}}], [{"a": {2}}]),
    "dtype": (torch.float16, torch.bfloat16),
    "nan": (float("nan"), float("nan")),
    "tensor": (torch.ones(2), torch.ones(2)),
    "array": (np.ones(2), np.ones(2)),
    "object": (object(), object()),
}
ALIKE: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "number": (1000, int("1000")),
    "text": ("fa3", "fa3"),
    "list": ([1, 2], [1, 2]),
    "set": ({1, 2}, {2, 1}),
    "dict": ({"a": [1], "b": 2}, {"b": 2, "a": [1]}),
    "dtype": (torch.float16, torch.half),
    "device": (torch.device("cpu"), torch.device("cpu")),
}


@pytest.mark.parametrize(("one", "other"), OTHERWISE.values(), ids=OTHERWISE)
def test_other_options_make_another_backend(
    make_runner: Make, made: list[Any], one: Any, other: Any
) -> None:
    runner = make_runner()
    assert runner.use_backend("one", option=one) is not runner.use_backend("one", option=other)


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_equal_options_find_the_backend_again(
    make_runner: Make, made: list[Any], one: Any, other: Any
) -> None:
    runner = make_runner()
    assert runner.use_backend("one", option=one) is runner.use_backend("one", option=other)


@pytest.mark.parametrize(
    "option", [torch.ones(2), np.ones(2), [torch.ones(2)]], ids=["tensor", "array", "list"]
)
def test_what_may_have_changed_unseen_makes_another_backend(
    make_runner: Make, made: list[Any], option: Any
) -> None:
    runner = make_runner()
    assert runner.use_backend("one", option=option) is not runner.use_backend("one", option=option)


def test_a_list_that_was_changed_since_makes_another_backend(
    make_runner: Make, made: list[Any]
) -> None:
    runner, option = make_runner(), [1]
    first = runner.use_backend("one", option=option)
    option.append(2)
    assert runner.use_backend("one", option=option) is not first


def test_the_name_is_part_of_the_recipe() -> None:
    assert recipe_of("one", {}) != recipe_of("two", {})


# Not too many


def test_of_many_backends_the_last_used_are_kept_and_the_others_counted(
    make_runner: Make, made: list[Any]
) -> None:
    runner = make_runner(keep_backends=3)
    one, two, three = (runner.use_backend(name) for name in ("one", "two", "three"))
    assert runner.kept_backends == (three, two, one)
    runner.use_backend("one")
    four = runner.use_backend("four")
    assert runner.kept_backends == (four, one, three)
    assert runner.stats.dropped_backends == {"toy": 2}  # the first of all, and "two"
    assert runner.use_backend("two") is not two


def test_the_metadata_of_a_backend_goes_with_it(
    make_runner: Make, make_backend: Make, make_batch: Make
) -> None:
    runner, other = make_runner(keep_backends=1), make_backend()
    first = runner.backend
    runner.use_backend(other)
    first.seen.clear()
    runner.use_backend(first)
    assert len(first.seen) == 2 * 2  # warmed up again
    assert runner.prefill(make_batch(3)).admission.bucket == 8


def test_by_default_eight_are_kept(make_runner: Make, made: list[Any]) -> None:
    runner = make_runner()
    for number in range(20):
        runner.use_backend("one", number=number)
    assert len(runner.kept_backends) == 8
    assert runner.kept_backends[0] is runner.backend


def test_what_is_in_use_is_kept_when_a_switch_fails(
    make_runner: Make, made: list[Any], make_batch: Make
) -> None:
    runner = make_runner(keep_backends=1)
    backend = runner.backend
    with pytest.raises(UnknownBackendError):
        runner.use_backend("unknown")
    assert runner.kept_backends == (backend,)
    assert runner.prefill(make_batch(3)).admission.bucket == 8


def test_less_than_the_one_in_use_cannot_be_kept(make_runner: Make) -> None:
    with pytest.raises(ValueError, match="keep_backends is 0, but the backend in use is kept"):
        make_runner(keep_backends=0, captured=False)
