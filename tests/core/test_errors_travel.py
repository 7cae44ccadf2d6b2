"""Every error of the project reaches another process as it was raised."""

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from bcg_core import BackendError, BcgError, KVCacheError, UnsupportedSpecError, errors
from bcg_harness import errors as harness_errors

ERRORS = sorted(
    {
        error
        for module in (errors, harness_errors)
        for _, error in inspect.getmembers(module, inspect.isclass)
        if issubclass(error, BcgError)
    },
    key=lambda error: error.__name__,
)
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def made(kind: type[BcgError]) -> BcgError:
    """Return an error with a note and a cause, as one that was raised."""
    arguments = ("toy", "too large") if issubclass(kind, BackendError) else ("too large",)
    error = kind(*arguments)
    error.add_note("raised in layer 3")
    error.__cause__ = ValueError("the reason")
    return error


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_it_was(kind: type[BcgError], way: Callable[[Any], Any]) -> None:
    error = made(kind)
    arrived = way(error)
    assert type(arrived) is kind
    assert (str(arrived), arrived.args, vars(arrived)) == (str(error), error.args, vars(error))
    assert arrived.__notes__ == ["raised in layer 3"]
    assert str(arrived.__cause__) == "the reason"


def test_a_cause_that_cannot_be_pickled_stays_behind() -> None:
    class LocalError(Exception):
        """Known to nobody elsewhere."""

    error = KVCacheError("too large")
    error.__cause__ = LocalError()
    assert str(pickle.loads(pickle.dumps(error))) == "too large"


def test_an_error_of_a_worker_reaches_the_caller() -> None:
    # Code as text: what pytest imported under a name of its own is not found by that name elsewhere.
    code = "from bcg_core import UnsupportedSpecError\nraise UnsupportedSpecError('toy', 'no')"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as workers:
        error = workers.submit(exec, code).exception()
    assert isinstance(error, UnsupportedSpecError)
    assert (error.backend, error.reason) == ("toy", "no")
