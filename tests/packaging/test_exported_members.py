"""``__all__`` of every package is the whole public surface, in order."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = ["bcg_core", "bcg_backends", "bcg_llama", "bcg_harness"]


def packages_below(name: str) -> list[str]:
    """Return ``name`` and its subpackages, without importing them."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None, f"{name} has no __init__.py"
    root = Path(spec.origin).parent
    inits = sorted(root.rglob("__init__.py"))
    return [".".join(path.parent.relative_to(root.parent).parts) for path in inits]


def exported(package: ModuleType) -> list[str]:
    """Return ``__all__``; a package that exports nothing may leave it out."""
    names: list[str] = getattr(package, "__all__", [])
    return names


def public_names(package: ModuleType) -> set[str]:
    """Return what ``dir`` shows of ``package`` apart from modules and private names."""
    return {
        name
        for name in dir(package)
        if not name.startswith("_") and not isinstance(getattr(package, name), ModuleType)
    }


def export_order(name: str) -> tuple[bool, bool, str]:
    """Sort constants first, then classes, then functions: the order that ruff (RUF022) writes."""
    constant = len(name) > 1 and name.isupper()
    return not constant, not name[0].isupper(), name


@pytest.fixture(params=[name for package in PACKAGES for name in packages_below(package)])
def package(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(request.param)


def test_exports_are_sorted_and_unique(package: ModuleType) -> None:
    assert exported(package) == sorted(set(exported(package)), key=export_order)


def test_every_export_resolves(package: ModuleType) -> None:
    assert [name for name in exported(package) if not hasattr(package, name)] == []


def test_every_public_name_is_exported(package: ModuleType) -> None:
    assert public_names(package) - set(exported(package)) == set()


@pytest.mark.parametrize("name", PACKAGES)
def test_import_packages_declare_their_exports(name: str) -> None:
    assert "__all__" in vars(import_module(name))
