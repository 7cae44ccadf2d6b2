"""Every fault of ``docs/recovery.md`` ends as the page says, and the batch after it is right."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).with_name("recovery_rows.py")))
ROWS: dict[str, Any] = SCRIPT["ROWS"]
PAGE = Path(__file__).parents[2] / "docs" / "recovery.md"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_batch_after_a_fault_is_right_and_the_page_says_what_happened(row: Any) -> None:
    line = SCRIPT["line_of"](row)
    assert " right, " in line
    assert line in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_no_other_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(SCRIPT["HEADER"])
    assert len(text[len(SCRIPT["HEADER"]) :].splitlines()) == len(ROWS)
