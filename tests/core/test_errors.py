"""The tree of exceptions: what a caller can catch."""

import inspect

import pytest

from bcg_core import BackendContractError, BackendError, BcgError, errors

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
