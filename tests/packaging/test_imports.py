"""Who may import whom, and what an import may drag in.

Two checks that complement each other: the source is read, so that a wrong import is named with its line, and a fresh
process imports everything, so that what the source does not show (a detour, ``importlib``) is seen as well.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = {"flash_attn", "flash_attn_3", "flash_attn_interface", "flashinfer", "xformers"}
CHECKPOINTS = {"accelerate", "gguf", "huggingface_hub", "transformers"}
DRAWING = {"jinja2", "markupsafe", "matplotlib"}
VENDORS = KERNELS | CHECKPOINTS | {"matplotlib"}

MODULE_LEVEL = {
    "bcg_core": {"torch"},
    "bcg_backends": {"bcg_core", "torch"},
    "bcg_llama": {"bcg_core", "numpy", "safetensors", "torch"},
    "bcg_harness": {
        "bcg_core",
        "bcg_llama",
        "numpy",
        "pytest",
        "rich",
        "safetensors",
        "torch",
        "typer",
    },
}
"""What runs when a module is imported; the standard library and the package itself go without saying."""

ANYWHERE = {
    "bcg_core": MODULE_LEVEL["bcg_core"],
    "bcg_backends": MODULE_LEVEL["bcg_backends"] | KERNELS,
    "bcg_llama": MODULE_LEVEL["bcg_llama"] | CHECKPOINTS,
    "bcg_harness": MODULE_LEVEL["bcg_harness"] | CHECKPOINTS | DRAWING,
}
"""What may also stand inside a function or under ``if TYPE_CHECKING``."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported top-level name and where it stands."""

    top: str
    line: int
    lazy: bool

    def allowed_in(self, package: str) -> bool:
        """Tell whether ``package`` may have this import."""
        allowed = (ANYWHERE if self.lazy else MODULE_LEVEL)[package]
        return self.top in allowed | {package} | sys.stdlib_module_names


def imports_of(node: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    """Yield the imports below ``node`` in source order."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                for alias in child.names:
                    yield Import(top=alias.name.split(".")[0], line=child.lineno, lazy=lazy)
            case ast.ImportFrom(level=0, module=str(module)):
                yield Import(top=module.split(".")[0], line=child.lineno, lazy=lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from imports_of(child, lazy=True)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from imports_of(ast.Module(body=child.body, type_ignores=[]), lazy=True)
                yield from imports_of(ast.Module(body=child.orelse, type_ignores=[]), lazy=lazy)
            case _:
                yield from imports_of(child, lazy=lazy)


def violations(package: str, source: str) -> list[str]:
    """Name the imports of ``source`` that ``package`` may not have, as ``line: name``."""
    found = imports_of(ast.parse(source))
    return [f"{item.line}: {item.top}" for item in found if not item.allowed_in(package)]


def folder_of(package: str) -> Path:
    """Return where ``package`` is installed, without importing it."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} has no __init__.py"
    return Path(spec.origin).parent


def modules_of(package: str) -> list[str]:
    """Return the dotted names of all modules of ``package``; ``__main__`` runs rather than imports."""
    folder = folder_of(package)
    parts = [path.relative_to(folder.parent).with_suffix("").parts for path in folder.rglob("*.py")]
    names = {".".join(part for part in path if part != "__init__") for path in parts}
    return sorted(name for name in names if not name.endswith("__main__"))


def imported_by(modules: list[str]) -> set[str]:
    """Import ``modules`` in a fresh process and return the top-level names it then holds."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*{name.split('.')[0] for name in sys.modules}, sep='\\n')"
    )
    process = subprocess.run(
        [sys.executable, "-I", "-c", code, *modules], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return set(process.stdout.split())


@pytest.mark.parametrize("package", MODULE_LEVEL)
def test_source_imports_only_what_its_package_may(package: str) -> None:
    folder = folder_of(package)
    wrong = {
        path.relative_to(folder.parent).as_posix(): found
        for path in sorted(folder.rglob("*.py"))
        if (found := violations(package, path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", MODULE_LEVEL)
def test_importing_every_module_imports_no_vendor_library(package: str) -> None:
    assert imported_by(modules_of(package)) & VENDORS == set()


def test_importing_the_whole_harness_imports_no_backend() -> None:
    assert "bcg_backends" not in imported_by(modules_of("bcg_harness"))


def test_importing_the_pytest_plugin_does_not_import_torch() -> None:
    assert "torch" not in imported_by(["bcg_harness.pytest_plugin"])


@pytest.mark.parametrize(
    ("package", "source"),
    [
        pytest.param("bcg_core", "import numpy", id="core-numpy"),
        pytest.param("bcg_core", "def f():\n    import numpy", id="core-numpy-lazily"),
        pytest.param("bcg_core", "from bcg_llama.model import Llama", id="core-llama"),
        pytest.param("bcg_backends", "import flashinfer", id="backends-vendor-at-import"),
        pytest.param(
            "bcg_backends", "class A:\n    import flash_attn", id="backends-vendor-in-class"
        ),
        pytest.param(
            "bcg_backends", "try:\n    import xformers\nfinally: pass", id="backends-vendor-tried"
        ),
        pytest.param(
            "bcg_backends", "def f():\n    import bcg_harness", id="backends-harness-lazily"
        ),
        pytest.param("bcg_backends", "def f():\n    import gguf", id="backends-gguf-lazily"),
        pytest.param("bcg_llama", "from transformers import AutoModel", id="llama-transformers"),
        pytest.param("bcg_harness", "def f():\n    import xformers", id="harness-kernels-lazily"),
        pytest.param(
            "bcg_harness",
            "if TYPE_CHECKING:\n    from bcg_backends import SDPABackend",
            id="harness-backend-for-types",
        ),
        pytest.param(
            "bcg_backends",
            "if TYPE_CHECKING: pass\nelse:\n    import gguf",
            id="backends-vendor-in-else",
        ),
    ],
)
def test_a_forbidden_import_is_found(package: str, source: str) -> None:
    assert len(violations(package, source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        pytest.param(
            "bcg_core", "import os.path, torch.nn\nfrom bcg_core.spec import X", id="core"
        ),
        pytest.param("bcg_core", "from . import spec", id="core-relative"),
        pytest.param(
            "bcg_backends", "def f():\n    import flashinfer.prefill", id="backends-vendor-lazily"
        ),
        pytest.param(
            "bcg_backends",
            "if TYPE_CHECKING:\n    import flashinfer",
            id="backends-vendor-for-types",
        ),
        pytest.param("bcg_harness", "from bcg_llama import Llama\nimport pytest", id="harness"),
    ],
)
def test_an_allowed_import_is_let_through(package: str, source: str) -> None:
    assert violations(package, source) == []


def test_a_fresh_process_sees_what_a_module_imports() -> None:
    assert {"json", "wave"} <= imported_by(["json", "wave"])
