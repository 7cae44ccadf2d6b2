"""What is said of vendor libraries that are missing, broken or hidden, and that nothing else needs them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from bcg_backends.vendor import import_error, refuse_head_dim
from bcg_core import AttentionSpec, BackendLimits, BackendRegistry, BackendUnavailableError

HINT = "pip install acme"
SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=16, scale=0.125
)
LIMITS = BackendLimits(max_tokens=64, max_requests=4, max_context=128, num_pages=8)

WriteModules = Callable[[dict[str, str]], None]


@pytest.fixture
def write_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModules]:
    """Return a function that puts files of source where an import finds them; their modules are forgotten after."""
    before = set(sys.modules)

    def write(sources: dict[str, str]) -> None:
        for name, source in sources.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0].startswith("acme"):
            del sys.modules[name]


# import_error


def test_a_module_that_imports_gives_no_reason(write_modules: WriteModules) -> None:
    write_modules({"acme.py": ""})
    assert import_error("acme", HINT) is None


def test_a_submodule_that_imports_gives_no_reason(write_modules: WriteModules) -> None:
    write_modules({"acme/__init__.py": "", "acme/kernels.py": ""})
    assert import_error("acme.kernels", HINT) is None


NOTHING: dict[str, dict[str, str]] = {
    "nothing": {},
    "empty_folder": {"acme/README": ""},
    "other_submodule": {"acme/__init__.py": "", "acme/other.py": ""},
    "no_package": {"acme.py": ""},
}


@pytest.mark.parametrize("sources", NOTHING.values(), ids=NOTHING)
def test_a_module_that_is_not_there_is_not_installed(
    write_modules: WriteModules, sources: dict[str, str]
) -> None:
    write_modules(sources)
    reason = import_error("acme.kernels", HINT)
    assert reason == "acme.kernels is not installed: pip install acme"


BROKEN = {
    "another_module": (
        "import acme_missing.part",
        "acme needs acme_missing, which is not installed",
    ),
    "a_name_that_begins_alike": (
        "import acmeplus",
        "acme needs acmeplus, which is not installed",
    ),
    "a_name_of_another_module": (
        "from json import no_such_name",
        "acme is installed but does not load: cannot import name 'no_such_name' from 'json'",
    ),
    "shared_library": (
        "import ctypes; ctypes.CDLL('libacme_missing.so.12')",
        "acme is installed but does not load: libacme_missing.so.12: cannot open shared object file",
    ),
    "symbol": (
        "raise ImportError('acme.so: undefined symbol: _ZN3c10')",
        "acme is installed but does not load: acme.so: undefined symbol: _ZN3c10",
    ),
    "anything": (
        "raise RuntimeError('built for another torch')",
        "acme is installed but does not load: built for another torch",
    ),
    "module_not_found_without_a_name": (
        "raise ModuleNotFoundError('run acme-setup first')",
        "acme is installed but does not load: run acme-setup first",
    ),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_module_that_is_broken_says_how(
    write_modules: WriteModules, source: str, reason: str
) -> None:
    write_modules({"acme.py": source})
    assert str(import_error("acme", HINT)).startswith(reason)


@pytest.mark.parametrize("source", [source for source, _ in BROKEN.values()], ids=BROKEN)
def test_a_module_that_is_broken_is_not_to_be_installed_again(
    write_modules: WriteModules, source: str
) -> None:
    write_modules({"acme.py": source})
    assert HINT not in str(import_error("acme", HINT))


def test_an_interrupt_is_not_taken_for_a_broken_module(write_modules: WriteModules) -> None:
    write_modules({"acme.py": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        import_error("acme", HINT)


def test_a_module_of_the_distribution_gives_no_reason(
    write_modules: WriteModules, install_distribution: Callable[[str, str], None]
) -> None:
    write_modules({"acme.py": ""})
    install_distribution("acme-new", "1.0")
    assert import_error("acme", HINT, distribution="acme-new") is None


def test_a_module_of_another_distribution_is_not_taken(
    write_modules: WriteModules, install_distribution: Callable[[str, str], None]
) -> None:
    write_modules({"acme.py": ""})
    install_distribution("acme-old", "1.0")
    reason = import_error("acme", HINT, distribution="acme-new")
    assert reason == "acme-new is not installed: pip install acme"


def test_a_distribution_without_its_module_is_not_installed(
    install_distribution: Callable[[str, str], None],
) -> None:
    install_distribution("acme-new", "1.0")
    reason = import_error("acme", HINT, distribution="acme-new")
    assert reason == "acme is not installed: pip install acme"


# refuse_head_dim


@pytest.mark.parametrize("head_dim", [8, 16, 64, 72, 128, 248, 256])
def test_multiples_of_8_up_to_256_are_taken(head_dim: int) -> None:
    assert refuse_head_dim(replace(SPEC, head_dim=head_dim)) is None


@pytest.mark.parametrize("head_dim", [1, 7, 9, 100, 257, 264, 512])
def test_other_head_dims_are_refused(head_dim: int) -> None:
    reason = refuse_head_dim(replace(SPEC, head_dim=head_dim))
    assert reason == f"head_dims: takes multiples of 8 up to 256, not {head_dim}"


# Nothing needs a vendor's library

BACKENDS = ["flash_attn", "flashinfer", "sdpa", "torch_varlen", "xformers"]
ADAPTERS = [*BACKENDS, "flash_attn_2", "flash_attn_3", "flash_attn_4", "varlen", "vendor"]
VENDORS = [
    "fa3_fwd",
    "fa3_fwd_interface",
    "flash_attn",
    "flash_attn_2_cuda",
    "flash_attn_3",
    "flash_attn_interface",
    "flashinfer",
    "xformers",
]
PACKAGES = ["bcg_core", "bcg_backends", "bcg_llama", "bcg_harness"]

# Every vendor's module fails to import, but for a flash_attn that is an empty folder where one is given; what was tried
# while importing, and what is said afterwards, is printed.
PROGRAM = """
import json, pkgutil, sys
from importlib import import_module
from importlib.machinery import PathFinder

packages, vendors, folder = json.loads(sys.argv[1])
tried = []

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in vendors:
            return None
        tried.append(name)
        if folder and name == "flash_attn":
            return PathFinder.find_spec(name, [folder])
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
imported = []
for package in map(import_module, packages):
    imported.append(package.__name__)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
            imported.append(module.name)
from bcg_core import BackendRegistry
registry = BackendRegistry()
names = registry.names()
loaded = {name: registry.load(name) for name in names}
while_importing = list(tried)
print(json.dumps({
    "imported": imported,
    "names": names,
    "tried": while_importing,
    "reasons": {name: backend.unavailable() for name, backend in loaded.items()},
    "tried_later": tried[len(while_importing):],
}))
"""


@pytest.fixture(scope="module", params=["blocked", "empty_flash_attn"])
def fresh_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Import everything in a process of its own, without any vendor's library."""
    folder = ""
    if request.param == "empty_flash_attn":
        path = tmp_path_factory.mktemp("site")
        (path / "flash_attn").mkdir()
        folder = str(path)
    arguments = json.dumps([PACKAGES, VENDORS, folder])
    process = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_imports(fresh_process: dict[str, Any], package: str) -> None:
    assert package in fresh_process["imported"]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_adapter_imports(fresh_process: dict[str, Any], adapter: str) -> None:
    assert f"bcg_backends.{adapter}" in fresh_process["imported"]


def test_every_backend_is_listed(fresh_process: dict[str, Any]) -> None:
    assert set(BACKENDS) <= set(fresh_process["names"])


def test_importing_and_listing_try_no_vendor_library(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["tried"] == []


@pytest.mark.parametrize(
    "vendor",
    ["fa3_fwd_interface", "flash_attn_2_cuda", "flash_attn_interface", "flashinfer", "xformers"],
)
def test_asking_what_is_missing_tries_it(fresh_process: dict[str, Any], vendor: str) -> None:
    assert vendor in fresh_process["tried_later"]


@pytest.mark.parametrize(
    ("backend", "hint"),
    [
        ("flash_attn", "flash_attn_2_cuda is not installed: pip install flash-attn "),
        ("flash_attn", "fa3_fwd_interface is not installed: pip install fa3-fwd"),
        ("flash_attn", "is not installed: pip install --pre flash-attn-4"),
        ("flashinfer", "flashinfer is not installed: pip install flashinfer-python"),
        ("xformers", "xformers.ops.fmha is not installed: pip install xformers"),
    ],
)
def test_what_is_missing_is_named_with_its_hint(
    fresh_process: dict[str, Any], backend: str, hint: str
) -> None:
    assert hint in fresh_process["reasons"][backend]


@pytest.mark.parametrize("backend", ["sdpa", "torch_varlen"])
def test_what_torch_brings_is_not_missing(fresh_process: dict[str, Any], backend: str) -> None:
    assert fresh_process["reasons"][backend] is None


@pytest.mark.parametrize(
    ("backend", "options", "hint"),
    [
        ("flash_attn", {}, "pip install flash-attn"),
        ("flash_attn", {"version": 2}, "pip install flash-attn --no-build-isolation"),
        ("flash_attn", {"version": 3}, "pip install fa3-fwd"),
        ("flash_attn", {"version": 4}, "pip install --pre flash-attn-4"),
        ("flashinfer", {}, "pip install flashinfer-python"),
        ("flashinfer", {"kernel": "fa3"}, "pip install flashinfer-python"),
        ("xformers", {}, "pip install xformers"),
    ],
    ids=str,
)
def test_asking_for_what_is_missing_is_an_error_with_the_hint(
    uninstall: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    options: dict[str, Any],
    hint: str,
) -> None:
    def version(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr("bcg_backends.vendor.version", version)
    uninstall(*VENDORS, "xformers.ops.fmha", "flash_attn.cute.interface")
    with pytest.raises(BackendUnavailableError, match=hint):
        BackendRegistry().create(backend, SPEC, LIMITS, torch.device("cuda"), **options)
