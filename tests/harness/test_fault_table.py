"""The table of faults is complete, up to date in the docs, and names tests that exist."""

import subprocess
import sys
from pathlib import Path

import pytest

from bcg_harness.faults import FAULTS, Fault, render

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Return the node ids of all tests in the files that the table names, and of their functions."""
    files = {proof.partition("::")[0] for fault in FAULTS for proof in fault.proofs}
    # `-P` keeps the source tree off the path, as plain `pytest` does.
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", *sorted(files)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    nodes = {line for line in answer.stdout.splitlines() if "::" in line}
    return nodes | {node.partition("[")[0] for node in nodes}


def test_every_class_is_there_once_and_in_order() -> None:
    assert [fault.number for fault in FAULTS] == list(range(1, 70))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_every_proof_is_a_test(fault: Fault, collected: set[str]) -> None:
    assert fault.proofs
    assert [proof for proof in fault.proofs if proof not in collected] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_no_proof_is_named_twice(fault: Fault) -> None:
    assert len(set(fault.proofs)) == len(fault.proofs)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_a_row_of_the_table_stays_one(fault: Fault) -> None:
    assert not {"|", "\n"} & set(fault.title + fault.by + fault.how)


def test_every_toy_that_a_check_finds_proves_something(collected: set[str]) -> None:
    test = "tests/harness/test_faults.py::test_fault_is_found_by_its_check["
    named = {proof for fault in FAULTS for proof in fault.proofs}
    unnamed = {node for node in collected if node.startswith(test)} - named
    assert unnamed == {f"{test}{toy}]" for toy in WITHOUT_A_CLASS}


WITHOUT_A_CLASS = {
    "backend-adds-to-foreign-slot",
    "backend-assumes-contiguous-pages",
    "backend-changes-cached-keys",
    "backend-changes-cached-values",
    "backend-changes-device-lengths",
    "backend-changes-keys",
    "backend-changes-page-table",
    "backend-changes-queries",
    "backend-changes-values",
    "backend-cannot-be-captured",
    "backend-gives-nan",
    "backend-ignores-lengths",
    "backend-masks-softly",
    "backend-overflows-softmax",
    "backend-scales-too-much",
    "backend-trusts-unwritten-slots",
    "backend-writes-cache-in-graph",
    "backend-zeroes-page-table",
    "model-caches-other-keys",
    "model-caches-other-values",
    "runner-samples-wrong-row",
    "runner-spoils-cache",
    "runner-spoils-first-replay",
    "runner-spoils-hidden",
    "runner-spoils-logits",
}
"""Plain mistakes of an adapter, a model or a runner, which have nothing to do with capture."""


def test_the_docs_are_up_to_date() -> None:
    written = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert written == render(), "run: python -m bcg_harness.faults > docs/faults.md"


def test_the_module_prints_the_docs() -> None:
    command = [sys.executable, "-m", "bcg_harness.faults"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == render()
