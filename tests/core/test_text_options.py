"""Options that are given as text arrive as what the constructor says, in plug-ins too."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from textwrap import dedent
from typing import Any

import pytest
import torch

from bcg_core import (
    ENTRY_POINT_GROUP,
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    BackendOptionError,
    BackendRegistry,
    create_backend,
)
from bcg_core.text_options import read_options

PLUGIN = """
    from __future__ import annotations

    from functools import wraps
    from enum import Enum
    from typing import TYPE_CHECKING, Any, Literal

    import torch
    from bcg_core import AttentionBackend, BackendOptionError, Capabilities

    if TYPE_CHECKING:
        from nowhere import AttentionSpec, Splits

    class Kernel(Enum):
        FAST = "fa2"

    class Toy(AttentionBackend):
        name = "toy"
        capabilities = Capabilities()

        def __init__(
            self,
            spec: AttentionSpec,  # not to be evaluated: there is no such module
            limits,
            device,
            *,
            splits: int = 1,
            share: float | None = None,
            causal: bool = True,
            kernel: Kernel | Literal["auto"] = "auto",
            label: str = "",
            accumulate: torch.dtype = torch.float32,
            tiles: list[int] = (),
            unseen: Splits = 4,
            unknown: Splits | None = None,
            anything: Any = None,
            bare=2,
            named="fa2",
            nameless=None,
            required,
        ): ...

        def init_forward_metadata(self, batch): ...
        def forward(self, q, k, v, kv_cache, layer, metadata, out): ...

    class PassesOn(Toy):
        def __init__(self, spec, limits, device, *, own: int = 1, **options):
            super().__init__(spec, limits, device, **options)

    class TakesNumbers(Toy):
        def __init__(self, spec, limits, device, **options: int): ...

    class TakesAnything(Toy):
        def __init__(self, *anything, **options): ...

    class Inherits(Toy): ...

    def logged(function):
        @wraps(function)
        def call(*given, **options):
            return function(*given, **options)
        return call

    class Wrapped(Toy):
        @logged
        def __init__(self, spec, limits, device, *, tile: int | None = None): ...

    class Family(AttentionBackend):
        name = "family"
        capabilities = Capabilities()

        @classmethod
        def variants(cls):
            return [{"version": 2}, {"version": 3}, {"kernel": "fa2"}]

        @classmethod
        def select(cls, options):
            rest = dict(options)
            version = rest.pop("version", 2)
            rest.pop("kernel", None)
            if version not in {2: Toy, 3: Wrapped, "auto": Toy}:
                raise BackendOptionError(cls.name, f"version {version!r}: takes 2, 3 and auto")
            return {2: Toy, 3: Wrapped, "auto": Toy}[version], rest
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendRegistry]:
    """Return a registry of the plug-in's classes, as an installed distribution registers them."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "typed_plugin.py").write_text(dedent(PLUGIN))
    names = ("Toy", "PassesOn", "TakesNumbers", "TakesAnything", "Inherits", "Wrapped", "Family")
    points = {name: [EntryPoint(name, f"typed_plugin:{name}", ENTRY_POINT_GROUP)] for name in names}
    sys.path.insert(0, str(folder))
    yield BackendRegistry(points)
    sys.path.remove(str(folder))
    sys.modules.pop("typed_plugin", None)


def read(registry: BackendRegistry, name: str, **texts: str) -> dict[str, Any]:
    if name in {"Toy", "Inherits", "PassesOn", "Family"} and texts.get("version") != "3":
        found = read_options(name, registry.load(name), {"required": "x", **texts})
        return {key: value for key, value in found.items() if key != "required"}
    return read_options(name, registry.load(name), texts)


TYPED: dict[str, tuple[str, str, str, Any]] = {
    "int": ("Toy", "splits", "3", 3),
    "float": ("Toy", "share", "0.5", 0.5),
    "none": ("Toy", "share", "none", None),
    "bool": ("Toy", "causal", "false", False),
    "literal": ("Toy", "kernel", "auto", "auto"),
    "text": ("Toy", "label", "3", "3"),
    "any": ("Toy", "anything", "3", "3"),
    "default-is-a-number": ("Toy", "bare", "3", 3),
    "default-is-text": ("Toy", "named", "3", "3"),
    "default-is-none": ("Toy", "nameless", "3", "3"),
    "type-checkers-alone-know-the-type": ("Toy", "unseen", "3", 3),
    "type-checkers-alone-and-no-default": ("Toy", "unknown", "3", "3"),
    "inherited": ("Inherits", "splits", "3", 3),
    "own-of-a-class-that-passes-on": ("PassesOn", "own", "3", 3),
    "passed-on": ("PassesOn", "splits", "3", 3),
    "all-of-one-type": ("TakesNumbers", "whatever", "3", 3),
    "untyped-and-passed-on": ("TakesAnything", "splits", "3", 3),
    "untyped-and-nobody-names-it": ("TakesAnything", "whatever", "3", "3"),
    "wrapped": ("Wrapped", "tile", "3", 3),
    "consumed-by-select": ("Family", "version", "3", 3),
    "consumed-by-select-and-no-variant": ("Family", "version", "auto", "auto"),
    "left-by-select": ("Family", "splits", "3", 3),
}


@pytest.mark.parametrize(("name", "option", "text", "value"), TYPED.values(), ids=TYPED)
def test_an_option_is_typed(
    registry: BackendRegistry, name: str, option: str, text: str, value: Any
) -> None:
    found = read(registry, name, **{option: text})[option]
    assert (found, type(found)) == (value, type(value))


def test_an_enumeration_is_read_by_value_and_by_name(registry: BackendRegistry) -> None:
    found = [read(registry, "Toy", kernel=text)["kernel"] for text in ("fa2", "FAST")]
    assert [member.name for member in found] == ["FAST", "FAST"]


def test_options_that_select_takes_are_typed_before_it_is_asked_and_others_after(
    registry: BackendRegistry,
) -> None:
    assert read(registry, "Family", version="3", tile="16") == {"version": 3, "tile": 16}


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "int": (
        "Toy",
        {"splits": "many"},
        r"option splits is 'many', expected a whole number, as in Toy\[splits=1\]",
    ),
    "default-is-none": (
        "Toy",
        {"share": "half"},
        r"expected a number or none, as in Toy\[share=0\.5\]",
    ),
    "bool": ("Toy", {"causal": "no"}, r"expected true or false, as in Toy\[causal=true\]"),
    "union": (
        "Toy",
        {"kernel": "fa9"},
        r"expected FAST or auto, as in Toy\[kernel=auto\]",
    ),
    "unannotated": ("Toy", {"bare": "x"}, r"expected a whole number, as in Toy\[bare=2\]"),
    "dtype": ("Toy", {"accumulate": "double16"}, r"as in Toy\[accumulate=float32\]"),
    "no-form": ("Toy", {"tiles": "1"}, r"its type list\[int\] cannot be given as text"),
    "left-by-select": ("Family", {"splits": "many"}, r"as in Family\[splits=1\]"),
    "consumed-by-select": ("Family", {"version": "5"}, "version 5: takes 2, 3 and auto"),
    "not-taken": ("Toy", {"spilts": "3"}, r"options \['required', 'spilts'\]"),
}


@pytest.mark.parametrize(("name", "texts", "message"), REFUSED.values(), ids=REFUSED)
def test_text_that_does_not_fit_is_refused_with_type_and_example(
    registry: BackendRegistry, name: str, texts: dict[str, str], message: str
) -> None:
    with pytest.raises(BackendOptionError, match=message):
        read(registry, name, **texts)


def test_options_from_python_are_left_as_they_are(toy_backend: type[Any]) -> None:
    class Keeps(toy_backend):  # type: ignore[misc]
        def __init__(self, spec: Any, limits: Any, device: Any, *, splits: int = 1) -> None:
            super().__init__(spec, limits, device)
            self.splits = splits

    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, page_size=4, scale=1.0
    )
    limits = BackendLimits(max_tokens=64, max_requests=4, max_context=64, num_pages=8)
    made: Any = create_backend(Keeps, spec, limits, torch.device("cpu"), splits="3")
    assert made.splits == "3"


def test_flash_attention_and_flashinfer_take_what_the_command_line_gives() -> None:
    registry = BackendRegistry()
    flashinfer = registry.load("flashinfer")
    assert read_options(
        "flashinfer", flashinfer, {"plans_in_flight": "3", "workspace_bytes": "268435456"}
    ) == {"plans_in_flight": 3, "workspace_bytes": 268435456}
    assert read_options("flash_attn", registry.load("flash_attn"), {"version": "3"}) == {
        "version": 3
    }


class Peeks(AttentionBackend):
    """Look at an option while selecting, and leave it for the constructor."""

    name = "peeks"

    def __init__(self, spec: Any, limits: Any, device: Any, *, splits: int = 1) -> None: ...

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        return ({},)

    @classmethod
    def select(cls, options: Mapping[str, Any]) -> tuple[type[AttentionBackend], dict[str, Any]]:
        assert options["splits"] > 1
        return cls, dict(options)


def test_an_option_that_the_registered_class_names_is_typed_before_it_selects() -> None:
    assert read_options("peeks", Peeks, {"splits": "3"}) == {"splits": 3}
