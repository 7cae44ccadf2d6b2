"""Values are written as text by their type, and read back."""

from enum import Enum
from pathlib import Path
from typing import Any, Literal, NewType, Optional, Union

import pytest
import torch

from bcg_core.option_forms import form_of, option_text


class Kernel(Enum):
    FAST = "fa2"
    EXACT = "reference"


Splits = NewType("Splits", int)

READ: dict[str, tuple[Any, str, Any]] = {
    "int": (int, "3", 3),
    "negative": (int, "-3", -3),
    "float": (float, "0.5", 0.5),
    "whole-float": (float, "3", 3.0),
    "exponent": (float, "1e-5", 1e-5),
    "true": (bool, "true", True),
    "false-as-python-writes-it": (bool, "False", False),
    "text": (str, "3", "3"),
    "path": (Path, "a/b.json", Path("a/b.json")),
    "dtype": (torch.dtype, "bfloat16", torch.bfloat16),
    "dtype-in-full": (torch.dtype, "torch.float16", torch.float16),
    "none": (type(None), "none", None),
    "enum-by-name": (Kernel, "FAST", Kernel.FAST),
    "enum-by-value": (Kernel, "reference", Kernel.EXACT),
    "literal": (Literal["fa2", 3], "fa2", "fa2"),
    "literal-number": (Literal["fa2", 3], "3", 3),
    "new-type": (Splits, "3", 3),
    "optional": (int | None, "3", 3),
    "optional-none": (int | None, "None", None),
    "old-optional": (Optional[int], "none", None),  # noqa: UP045
    "old-union": (Union[float, int], "3", 3),  # noqa: UP007
    "narrowest-is-whole": (str | float | int, "3", 3),
    "narrowest-is-number": (str | float | int, "3.5", 3.5),
    "narrowest-is-text": (str | float | int, "auto", "auto"),
    "narrowest-is-true": (int | bool, "true", True),
    "auto-or-number": (Literal["auto"] | int, "auto", "auto"),
    "member-without-form": (list[int] | int, "3", 3),
}


@pytest.mark.parametrize(("kind", "text", "value"), READ.values(), ids=READ)
def test_text_is_read_by_its_type(kind: Any, text: str, value: Any) -> None:
    form = form_of(kind)
    assert form is not None
    found = form.read(text)
    assert (found, type(found)) == (value, type(value))


REFUSED: dict[str, tuple[Any, str]] = {
    "int": (int, "3.5"),
    "empty": (int, ""),
    "too-many-digits": (int, "9" * 5000),
    "float": (float, "fast"),
    "bool": (bool, "1"),
    "dtype": (torch.dtype, "Tensor"),
    "no-dtype": (torch.dtype, "float17"),
    "enum": (Kernel, "fast"),
    "literal": (Literal["fa2", 3], "4"),
    "union": (int | None, "auto"),
}


@pytest.mark.parametrize(("kind", "text"), REFUSED.values(), ids=REFUSED)
def test_text_that_does_not_fit_is_refused(kind: Any, text: str) -> None:
    form = form_of(kind)
    assert form is not None
    with pytest.raises(ValueError, match=r".*"):
        form.read(text)


WORDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "optional": (int | None, "a whole number or none"),
    "enum": (Kernel, "one of FAST, EXACT"),
    "single": (Literal["fa2"], "fa2"),
    "union": (Literal["auto"] | float, "auto or a number"),
}


@pytest.mark.parametrize(("kind", "words"), WORDS.values(), ids=WORDS)
def test_a_form_says_what_is_expected(kind: Any, words: str) -> None:
    form = form_of(kind)
    assert form is not None
    assert form.words == words


EXAMPLES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "text": str,
    "path": Path,
    "dtype": torch.dtype,
    "none": type(None),
    "optional": float | None,
    "enum": Kernel,
    "literal": Literal[3, "fa2"],
}


@pytest.mark.parametrize("kind", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_fits(kind: Any) -> None:
    form = form_of(kind)
    assert form is not None
    assert option_text(form.read(form.example)) == form.example


@pytest.mark.parametrize(
    "kind",
    [list[int], dict, torch.Tensor, list[int] | dict[str, int], [], "int"],
    ids=["generic", "class", "tensor", "union", "no-type", "unevaluated"],
)
def test_other_types_have_no_form(kind: Any) -> None:
    assert form_of(kind) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (True, "true"), (None, "none"), (Kernel.FAST, "FAST"), (torch.float16, "float16")],
    ids=["int", "bool", "none", "enum", "dtype"],
)
def test_a_value_is_written_as_it_is_read(value: Any, text: str) -> None:
    assert option_text(value) == text
    form = form_of(type(value))
    assert form is not None
    assert form.read(text) == value
