"""The tree of exceptions: what a caller can catch."""

import copy
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

import pytest

from bcg_core import (
    BackendContractError,
    BackendError,
    BcgError,
    UnknownBackendError,
    errors,
)

ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, Exception)
]

PARENTS = {
    "CaptureError": RuntimeError,
    "NestedCaptureError": errors.CaptureError,
    "HostReadError": errors.CaptureError,
    "BreakOutputError": errors.CaptureError,
    "RunnerBusyError": RuntimeError,
    "BatchError": ValueError,
    "BucketError": ValueError,
    "KVCacheError": ValueError,
    "CheckpointError": ValueError,
    "DebugError": RuntimeError,
    "StaleTensorError": errors.DebugError,
    "HiddenOutputError": errors.DebugError,
    "PaddingLeakError": errors.DebugError,
    "StrayWriteError": errors.DebugError,
    "StreamError": errors.DebugError,
    "SynchronisationError": errors.DebugError,
    "UnknownBackendError": LookupError,
    "BackendOptionError": TypeError,
    "DuplicateBackendError": BackendError,
    "BackendLoadError": BackendError,
    "BackendUnavailableError": BackendError,
    "UnsupportedSpecError": BackendError,
    "BackendContractError": BackendError,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_of_the_project_is_a_bcg_error(error: type[Exception]) -> None:
    assert issubclass(error, BcgError)


@pytest.mark.parametrize(("name", "parent"), PARENTS.items(), ids=PARENTS)
def test_an_error_can_be_caught_as_what_it_is(name: str, parent: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), parent)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_the_tree_in_the_documentation_has_every_error(error: type[Exception]) -> None:
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


def test_an_error_of_a_backend_carries_and_says_its_name() -> None:
    error = BackendContractError("toy", "returned nothing")
    assert error.backend == "toy"
    assert str(error) == "attention backend 'toy': returned nothing"


# Pickles and copies


def public_errors() -> list[type[BaseException]]:
    """Return all errors that modules of the packages show under a name without an underscore."""
    found: set[type[BaseException]] = set()
    for package in ("bcg_core", "bcg_backends", "bcg_llama", "bcg_harness"):
        for module in modules_below(package):
            for name, value in vars(module).items():
                if isinstance(value, type) and issubclass(value, BaseException):
                    ours = value.__module__.startswith("bcg_")
                    found |= {value} if ours and not name.startswith("_") else set()
    return sorted(found, key=lambda error: error.__name__)


def modules_below(package: str) -> Iterator[Any]:
    """Yield ``package`` and all modules that hold its errors."""
    root = import_module(package)
    yield root
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        if info.name.endswith("errors"):
            yield import_module(info.name)


def made(error: type[BaseException]) -> BaseException:
    """Make an error of texts, with an attribute and a note."""
    texts = ("one", "two") if issubclass(error, BackendError) else ("one",)
    raised = error(*texts)
    raised.extra = 3  # type: ignore[attr-defined]
    raised.add_note("a note")
    return raised


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle_{protocol}": lambda error, protocol=protocol: pickle.loads(
            pickle.dumps(error, protocol)
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("error", public_errors(), ids=lambda error: error.__name__)
def test_a_copy_of_an_error_is_like_it(
    error: type[BaseException], duplicate: Callable[[Any], Any]
) -> None:
    raised = made(error)
    copied = duplicate(raised)
    assert type(copied) is error
    assert (str(copied), copied.args, vars(copied)) == (str(raised), raised.args, vars(raised))
    assert copied is not raised


def test_all_errors_of_the_tree_are_copied_in_tests() -> None:
    assert set(ERRORS) <= set(public_errors())


class PlugInError(BackendError):
    """An error of a plug-in, with parameters of its own."""

    def __init__(self, layer: int) -> None:
        super().__init__("toy", f"layer {layer}")
        self.layer = layer


class ForgetfulError(BackendError):
    """An error that is copied as Python does by default."""

    __reduce__ = Exception.__reduce__


def test_an_error_with_parameters_of_its_own_is_copied() -> None:
    copied = copy.deepcopy(PlugInError(3))
    assert (copied.layer, copied.backend, str(copied)) == (
        3,
        "toy",
        "attention backend 'toy': layer 3",
    )


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_cause(duplicate: Callable[[Any], Any]) -> None:
    raised = BackendContractError("toy", "returned nothing")
    raised.__cause__ = ZeroDivisionError("why")
    assert repr(duplicate(raised).__cause__) == "ZeroDivisionError('why')"


def test_a_cause_that_cannot_be_pickled_is_left_out() -> None:
    raised = BackendContractError("toy", "returned nothing")
    raised.__cause__ = ForgetfulError("toy", "says not how to make it")
    assert pickle.loads(pickle.dumps(raised)).__cause__ is None


def test_without_a_way_to_make_it_again_an_error_of_a_backend_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        copy.copy(ForgetfulError("toy", "returned nothing"))


IN_A_WORKER = "from bcg_core import BackendRegistry; BackendRegistry({}).load('missing')"


def test_an_error_of_a_worker_process_arrives_as_it_was_raised() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as workers:
        failure = workers.submit(exec, IN_A_WORKER).exception()
    assert type(failure) is UnknownBackendError
    assert failure.backend == "missing"
    assert failure.reason.startswith("not registered")
