"""One class of faults, and what is done about it."""

from dataclasses import dataclass
from enum import Enum


class Caught(Enum):
    """Name what stands against a fault; the values are what the table shows."""

    CHECK = "check"
    """A check of the matrix finds it: ``bcg check`` fails."""
    ERROR = "error"
    """The core or an adapter refuses the attempt with an error, or counts it with its reason."""
    DESIGN = "design"
    """Nothing that a caller can do leads there."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Describe a class of faults.

    Attributes:
        number: position in the table, from 1.
        title: what goes wrong.
        caught: the kind of guard.
        by: its name: checks, an error, or what the design rests on.
        how: what it does.
        proofs: node ids of tests of this repository: of the guard, or of the fault that it finds.
    """

    number: int
    title: str
    caught: Caught
    by: str
    how: str
    proofs: tuple[str, ...]


def found(*toys: str) -> tuple[str, ...]:
    """Return the node ids of the tests in which a check finds ``toys``: faulty models, backends and runners."""
    return tuple(
        f"tests/harness/test_faults.py::test_fault_is_found_by_its_check[{toy}]" for toy in toys
    )


def tests(file: str, *names: str) -> tuple[str, ...]:
    """Return the node ids of the tests called ``names`` in ``tests/<file>``."""
    return tuple(f"tests/{file}::{name}" for name in names)
