"""Dataclasses as JSON and back: what is read, and what is refused with its place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from bcg_harness.errors import HarnessError
from bcg_harness.typed_json import from_json, to_json


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    radius: float

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise HarnessError("too small")


@dataclass(frozen=True, kw_only=True)
class Car:
    name: str
    doors: int
    colour: Colour
    wheels: tuple[Wheel, ...]
    position: tuple[int, int]
    prices: Mapping[int, str]
    spare: Wheel | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, list[str]] = field(default_factory=dict)


CAR = Car(
    name="a",
    doors=4,
    colour=Colour.BLUE,
    wheels=(Wheel(radius=1.5), Wheel(radius=2)),
    position=(1, 2),
    prices={2: "two"},
    spare=Wheel(radius=0.5),
    about={"anything": [1, {"goes": None}]},
    notes={"x": ["y", "z"]},
)


def raw(**changes: Any) -> Any:
    return {**json.loads(json.dumps(to_json(CAR))), **changes}


def test_what_was_written_is_read_back() -> None:
    assert from_json(Car, raw()) == CAR


def test_what_may_be_left_out_takes_its_default() -> None:
    short = {key: value for key, value in raw().items() if key not in ("spare", "about", "notes")}
    assert from_json(Car, short).spare is None
    assert from_json(Car, short).about == {}


def test_keys_without_a_field_are_left_alone() -> None:
    assert from_json(Car, raw(derived=7)) == CAR


def test_what_must_be_there_is_missed() -> None:
    with pytest.raises(HarnessError, match=r"wheels\[0\]\.radius is missing"):
        from_json(Car, raw(wheels=[{}]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"name": 1}, "name is 1, expected a text", id="text"),
        pytest.param({"doors": 1.5}, "doors is 1.5, expected a whole number", id="integer"),
        pytest.param({"doors": True}, "doors is True, expected a whole number", id="bool"),
        pytest.param({"spare": {"radius": float("nan")}}, "spare.radius is nan", id="nan"),
        pytest.param({"spare": {"radius": None}}, "spare.radius is None", id="null"),
        pytest.param({"spare": {"radius": -1}}, "spare: too small", id="refused-by-its-class"),
        pytest.param({"colour": "green"}, "expected one of", id="enum"),
        pytest.param({"colour": []}, "expected one of", id="no-enum"),
        pytest.param({"wheels": {}}, "wheels is {}, expected an array", id="array"),
        pytest.param({"wheels": [3]}, "wheels[0] is 3, expected an object", id="object"),
        pytest.param({"position": [1]}, "expected an array of 2", id="length"),
        pytest.param({"prices": {"x": "y"}}, "whole numbers as keys", id="key"),
        pytest.param({"prices": []}, "prices is [], expected an object", id="mapping"),
        pytest.param({"notes": {"x": "y"}}, "notes.x is 'y', expected an array", id="inside"),
        pytest.param({"name": ["x" * 99]}, "..., expected a text", id="long"),
    ],
)
def test_another_type_is_refused_with_its_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(HarnessError) as caught:
        from_json(Car, raw(**change))
    assert words in str(caught.value)


def test_the_whole_has_to_be_an_object() -> None:
    with pytest.raises(HarnessError, match="the whole is 3, expected an object"):
        from_json(Car, 3)
