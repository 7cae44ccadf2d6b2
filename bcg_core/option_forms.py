"""How values of a type are written as text, and read back: on a command line every option is text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, Union, get_args, get_origin

import torch


@dataclass(frozen=True, kw_only=True)
class Form:
    """Describe how values of a type are written.

    Attributes:
        words: what is expected, for messages.
        example: text that fits.
        read: turns text into a value; raises ValueError for text that does not fit.
        rank: place among the members of a union, narrow ones first: what is a whole number is a number too, and a text.
    """

    words: str
    example: str
    read: Callable[[str], Any]
    rank: int = 0


def option_text(value: Any) -> str:
    """Return how ``value`` is written, for ``form_of`` its type to read; other types as ``str`` has them."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def form_of(annotation: Any) -> Form | None:
    """Return how values of ``annotation`` are written; None for a type that has no form as text.

    Known are bool, int, float, str, None, ``torch.dtype``, paths, enumerations (by name or value), Literal, and unions
    of these, of which the narrowest that fits is read: ``int | str`` reads 3 as a number.
    """
    while isinstance(annotation, NewType):
        annotation = annotation.__supertype__
    origin = get_origin(annotation)
    if origin is Literal:
        return _choice({option_text(value): value for value in get_args(annotation)})
    if origin in (Union, UnionType):
        return _union(filter(None, map(form_of, get_args(annotation))))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        by_value = {option_text(member.value): member for member in annotation}
        return _choice({member.name: member for member in annotation}, by_value)
    return _FORMS.get(annotation) if isinstance(annotation, type) else None


def _union(members: Iterable[Form]) -> Form | None:
    forms = sorted(members, key=lambda form: form.rank)
    if not forms:
        return None

    def read(text: str) -> Any:
        for form in forms:
            try:
                return form.read(text)
            except ValueError:
                continue
        raise ValueError(text)

    shown = [form for form in forms if form is not _NONE] or forms
    return Form(
        words=" or ".join(dict.fromkeys(form.words for form in [*shown, *forms])),
        example=shown[0].example,
        read=read,
        rank=forms[-1].rank,
    )


def _choice(shown: dict[str, Any], others: dict[str, Any] | None = None) -> Form:
    known = {**(others or {}), **shown}

    def read(text: str) -> Any:
        if text not in known:
            raise ValueError(text)
        return known[text]

    return Form(words=_one_of(list(shown)), example=next(iter(shown), ""), read=read)


def _one_of(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def _read_dtype(text: str) -> torch.dtype:
    match getattr(torch, text.removeprefix("torch."), None):
        case torch.dtype() as found:
            return found
    raise ValueError(text)


def _read_word(words: dict[str, Any]) -> Callable[[str], Any]:
    """Return a reader of ``words`` that takes capitals too, as Python writes them."""

    def read(text: str) -> Any:
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]

    return read


_NONE = Form(words="none", example="none", read=_read_word({"none": None}))
_FORMS: dict[type, Form] = {
    NoneType: _NONE,
    bool: Form(
        words="true or false", example="true", read=_read_word({"true": True, "false": False})
    ),
    int: Form(words="a whole number", example="2", read=int, rank=1),
    float: Form(words="a number", example="0.5", read=float, rank=2),
    torch.dtype: Form(words="an element type of torch", example="bfloat16", read=_read_dtype),
    str: Form(words="a text", example="text", read=str, rank=3),
    Path: Form(words="a path", example="file", read=Path, rank=3),
}
