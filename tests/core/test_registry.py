"""The registry: names without loading, an error for each way an entry point can be wrong, options that arrive.

Distributions are real ``dist-info`` folders on the path, as an installer writes them.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from bcg_core import (
    ENTRY_POINT_GROUP,
    AttentionSpec,
    BackendError,
    BackendLimits,
    BackendLoadError,
    BackendOptionError,
    BackendRegistry,
    BackendUnavailableError,
    DuplicateBackendError,
    UnknownBackendError,
    UnsupportedSpecError,
    create_backend,
)

CPU = torch.device("cpu")
LIMITS = BackendLimits(max_tokens=64, max_requests=4, max_context=64, num_pages=8)
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, page_size=4, scale=1.0
)

PLUGIN = """
    import torch
    from bcg_core import AttentionBackend, BackendOptionError, Capabilities

    class Toy(AttentionBackend):
        name = "toy"
        capabilities = Capabilities(
            dtypes=frozenset({torch.float32}), head_dims=None, devices=frozenset({"cpu"}), gqa=True
        )

        def __init__(self, spec, limits, device, *, splits=1):
            super().__init__(spec, limits, device)
            self.splits = splits

        def init_forward_metadata(self, batch): ...
        def forward(self, q, k, v, kv_cache, layer, metadata, out): ...

    class Missing(Toy):
        @classmethod
        def unavailable(cls):
            return "toylib is missing: pip install toylib"

    class Small(Toy):
        capabilities = Capabilities(
            dtypes=frozenset({torch.float32}), head_dims=frozenset({4}), devices=frozenset({"cpu"})
        )

    class Fragile(Toy):
        def __init__(self, spec, limits, device):
            raise TypeError("raised by the constructor itself")

    class Unlike(Toy):
        def __init__(self): ...

    class Nameless(AttentionBackend):
        def init_forward_metadata(self, batch): ...

    class Family(AttentionBackend):
        # Covers three kernels, and stays abstract itself.
        name = "family"
        capabilities = Capabilities()

        @classmethod
        def select(cls, options):
            rest = dict(options)
            kernel = rest.pop("kernel", "toy")
            if kernel not in KERNELS:
                raise BackendOptionError(cls.name, f"kernel {kernel!r}: takes {sorted(KERNELS)}")
            return KERNELS[kernel], rest

    KERNELS = {"toy": Toy, "small": Small, "missing": Missing}

    class Mistaken(Toy):
        capabilities = {"gqa": True}

    class NoBackend: ...

    instance = Toy(None, None, None)
"""


class Environment:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = f"plugin_{folder.name}"
        (folder / f"{self.module}.py").write_text(dedent(PLUGIN))

    def install(self, distribution: str, **points: str) -> None:
        """Register ``points``; a value is an object of the plug-in module, or ``module:object``."""
        info = self.folder / f"{distribution}-1.0.dist-info"
        info.mkdir()
        lines = [
            f"{name} = {value if ':' in value else f'{self.module}:{value}'}"
            for name, value in points.items()
        ]
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))

    def loaded(self) -> bool:
        return self.module in sys.modules


@pytest.fixture
def environment(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Environment]:
    environment = Environment(tmp_path_factory.mktemp("site"))
    monkeypatch.syspath_prepend(environment.folder)
    yield environment
    sys.modules.pop(environment.module, None)


def create(name: str, *, spec: AttentionSpec = SPEC, **options: Any) -> Any:
    return BackendRegistry().create(name, spec, LIMITS, CPU, **options)


# Names


def test_names_are_sorted(environment: Environment) -> None:
    environment.install("one", zebra="Toy", ant="Toy")
    names = BackendRegistry().names()
    assert names == sorted(names)
    assert {"ant", "zebra"} <= set(names)


def test_a_distribution_can_register_any_number_of_names(environment: Environment) -> None:
    environment.install("one", **{f"toy{number}": "Toy" for number in range(20)})
    assert {f"toy{number}" for number in range(20)} <= set(BackendRegistry().names())


def test_the_built_in_backend_registers_like_any_other() -> None:
    assert "sdpa" in BackendRegistry().names()


def test_looking_at_names_loads_nothing(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    BackendRegistry().names()
    assert not environment.loaded()


def test_names_are_read_once(environment: Environment) -> None:
    registry = BackendRegistry()
    environment.install("one", toy="Toy")
    assert "toy" not in registry.names()


def test_entry_points_can_be_given() -> None:
    point = EntryPoint(name="mine", value="bcg_backends.sdpa:SDPABackend", group=ENTRY_POINT_GROUP)
    registry = BackendRegistry({"mine": [point]})
    assert registry.names() == ["mine"]
    assert registry.load("mine").name == "sdpa"


def test_a_distribution_that_is_on_the_path_twice_counts_once(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment.install("one", toy="Toy")
    again = Environment(tmp_path)
    again.module = environment.module
    again.install("one", toy="Toy")
    monkeypatch.syspath_prepend(tmp_path)
    assert BackendRegistry().load("toy").name == "toy"


# Loading


def test_loading_imports_the_class(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    assert BackendRegistry().load("toy").__name__ == "Toy"
    assert environment.loaded()


def test_loading_one_name_does_not_load_another(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    BackendRegistry().load("sdpa")
    assert not environment.loaded()


def test_an_unknown_name_lists_the_known_ones(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    with pytest.raises(UnknownBackendError, match=r"'tyo': not registered; .*sdpa.*toy") as caught:
        BackendRegistry().load("tyo")
    assert caught.value.backend == "tyo"


def test_an_unknown_name_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="known backends: none"):
        BackendRegistry({}).load("sdpa")


def test_two_distributions_with_one_name_are_both_named(environment: Environment) -> None:
    environment.install("second", toy="Toy")
    environment.install("first", toy="Small")
    with pytest.raises(
        DuplicateBackendError, match="'toy': registered by first and second: uninstall one"
    ):
        BackendRegistry().load("toy")


def test_a_duplicate_is_harmless_to_other_names(environment: Environment) -> None:
    environment.install("first", toy="Toy")
    environment.install("second", toy="Toy", other="Toy")
    assert BackendRegistry().load("other").name == "toy"
    assert "toy" in BackendRegistry().names()


BROKEN = {
    "module": "no_such_module_at_all:Backend",
    "attribute": "math:no_such_backend",
    "vendor": "plugin_with_vendor:Backend",
    "exit": "plugin_that_exits:Backend",
    "base": "plugin_that_stops:Backend",
}


@pytest.fixture
def broken(environment: Environment) -> Environment:
    code = "raise OSError('libvendor.so.3: cannot open shared object file')"
    (environment.folder / "plugin_with_vendor.py").write_text(code)
    (environment.folder / "plugin_that_exits.py").write_text("raise SystemExit('no licence')")
    (environment.folder / "plugin_that_stops.py").write_text("raise BaseException('no such CPU')")
    environment.install("broken", **BROKEN)
    return environment


@pytest.mark.parametrize(
    ("name", "message", "cause"),
    [
        ("module", "No module named 'no_such_module_at_all'", ModuleNotFoundError),
        ("attribute", "no_such_backend", AttributeError),
        ("vendor", "libvendor.so.3: cannot open shared object file", OSError),
        ("exit", "no licence", SystemExit),
        ("base", "no such CPU", BaseException),
    ],
    ids=BROKEN,
)
def test_a_broken_entry_point_is_an_error_for_its_own_name(
    broken: Environment, name: str, message: str, cause: type[BaseException]
) -> None:
    expected = rf"'{name}': entry point '{BROKEN[name]}' of broken failed to load: .*{message}"
    with pytest.raises(BackendLoadError, match=expected) as caught:
        BackendRegistry().load(name)
    assert isinstance(caught.value.__cause__, cause)


def test_a_broken_entry_point_is_harmless_to_other_names(broken: Environment) -> None:
    broken.install("good", toy="Toy")
    registry = BackendRegistry()
    assert set(BROKEN) < set(registry.names())
    assert registry.load("toy").name == "toy"
    assert registry.load("sdpa").name == "sdpa"


def test_an_interrupt_while_a_plug_in_is_imported_ends_the_run(environment: Environment) -> None:
    (environment.folder / "interrupted_plugin.py").write_text("raise KeyboardInterrupt")
    environment.install("slow", slow="interrupted_plugin:Backend")
    with pytest.raises(KeyboardInterrupt):
        BackendRegistry().load("slow")


@pytest.mark.parametrize("name", ["two words", "a/b", "toy[x]", "a,b"])
def test_a_name_that_could_be_taken_for_something_else_is_refused_alone(
    environment: Environment, name: str
) -> None:
    environment.install("odd", **{name: "Toy", "plain-1.0_x": "Toy"})
    registry = BackendRegistry()
    with pytest.raises(BackendLoadError, match="of odd needs another name: letters, digits"):
        registry.load(name)
    assert registry.load("plain-1.0_x").name == "toy"


@pytest.mark.parametrize("value", ["NoBackend", "instance", "math:pi", "bcg_core:PagedKVCache"])
def test_an_object_that_is_no_backend_class_is_refused(
    environment: Environment, value: str
) -> None:
    environment.install("odd", odd=value)
    with pytest.raises(BackendLoadError, match=r"of odd is no AttentionBackend subclass"):
        BackendRegistry().load("odd")


def test_a_backend_class_that_is_not_finished_is_refused(environment: Environment) -> None:
    environment.install("odd", odd="Nameless")
    with pytest.raises(
        BackendLoadError, match="of odd does not define name, capabilities, forward"
    ):
        BackendRegistry().load("odd")


def test_capabilities_of_another_type_are_refused(environment: Environment) -> None:
    environment.install("odd", odd="Mistaken")
    with pytest.raises(
        BackendLoadError, match=r"'odd': .*has capabilities that are no Capabilities: {'gqa': True}"
    ):
        BackendRegistry().load("odd")


def test_a_class_that_no_distribution_registers_is_called_that() -> None:
    point = EntryPoint(name="lost", value="math:pi", group=ENTRY_POINT_GROUP)
    with pytest.raises(
        BackendLoadError, match="class 'math:pi', which no distribution registers, is no"
    ):
        BackendRegistry({"lost": [point]}).load("lost")


# Making


def test_a_backend_is_made_for_its_spec(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    backend = create("toy")
    assert (backend.spec, backend.limits, backend.device) == (SPEC, LIMITS, CPU)


def test_options_reach_the_constructor(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    assert create("toy").splits == 1
    assert create("toy", splits=3).splits == 3


def test_an_option_that_is_not_taken_is_named(environment: Environment) -> None:
    environment.install("one", toy="Toy")
    with pytest.raises(
        BackendOptionError, match=r"'toy': options \['spilts'\]: .*'spilts'"
    ) as caught:
        create("toy", spilts=3)
    assert isinstance(caught.value, TypeError)


def test_a_constructor_with_another_signature_is_told_which_is_expected(
    environment: Environment,
) -> None:
    environment.install("one", unlike="Unlike")
    with pytest.raises(
        BackendOptionError,
        match=r"no options: too many .* made with \(spec, limits, device, \*\*options\), and Unlike takes \(\)",
    ):
        create("unlike")


def test_a_missing_library_is_reported_with_the_install_hint(environment: Environment) -> None:
    environment.install("one", missing="Missing")
    with pytest.raises(BackendUnavailableError, match="toylib is missing: pip install toylib"):
        create("missing")


def test_an_unsupported_shape_names_the_capability(environment: Environment) -> None:
    environment.install("one", small="Small")
    with pytest.raises(UnsupportedSpecError, match=r"head_dims: takes \[4\], not 8"):
        create("small")


def test_availability_is_asked_before_the_shape(environment: Environment) -> None:
    environment.install("one", missing="Missing")
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.int8, page_size=4, scale=1.0
    )
    with pytest.raises(BackendUnavailableError):
        create("missing", spec=spec)


def test_a_type_error_of_the_constructor_is_no_option_error(environment: Environment) -> None:
    environment.install("one", fragile="Fragile")
    with pytest.raises(TypeError, match="raised by the constructor itself") as caught:
        create("fragile")
    assert not isinstance(caught.value, BackendOptionError)


def test_a_backend_can_be_made_from_its_class(toy_backend: Callable[..., Any]) -> None:
    assert create_backend(toy_backend, SPEC, LIMITS, CPU).name == "toy"


# Selecting a class


def test_a_class_may_select_another(environment: Environment) -> None:
    environment.install("one", family="Family")
    assert type(create("family")).__name__ == "Toy"


def test_options_that_are_left_reach_the_class_that_was_selected(
    environment: Environment,
) -> None:
    environment.install("one", family="Family")
    assert create("family", kernel="toy", splits=3).splits == 3


def test_limits_are_those_of_the_class_that_was_selected(environment: Environment) -> None:
    environment.install("one", family="Family")
    with pytest.raises(UnsupportedSpecError, match=r"head_dims: takes \[4\], not 8"):
        create("family", kernel="small")


def test_availability_is_that_of_the_class_that_was_selected(environment: Environment) -> None:
    environment.install("one", family="Family")
    with pytest.raises(BackendUnavailableError, match="pip install toylib"):
        create("family", kernel="missing")


SELECTED: dict[str, tuple[dict[str, Any], type[BackendError], str]] = {
    "unavailable": ({"kernel": "missing"}, BackendUnavailableError, "toy: toylib is missing"),
    "unsupported": ({"kernel": "small"}, UnsupportedSpecError, "toy: head_dims: takes"),
    "option": ({"spilts": 3}, BackendOptionError, r"toy: options \['spilts'\]"),
}


@pytest.mark.parametrize(("options", "kind", "message"), SELECTED.values(), ids=SELECTED)
def test_errors_carry_the_name_that_was_asked_for_and_mention_the_class_that_was_selected(
    environment: Environment, options: dict[str, Any], kind: type[BackendError], message: str
) -> None:
    environment.install("one", alias="Family")
    with pytest.raises(kind, match=f"^attention backend 'alias': {message}") as caught:
        create("alias", **options)
    assert caught.value.backend == "alias"


def test_a_value_that_selects_nothing_is_noted_with_the_name_that_was_asked_for(
    environment: Environment,
) -> None:
    environment.install("one", alias="Family")
    with pytest.raises(BackendOptionError, match="'family': kernel 'tyo'") as caught:
        create("alias", kernel="tyo")
    assert caught.value.__notes__ == ["asked for as 'alias'"]


def test_a_value_that_selects_nothing_is_refused(environment: Environment) -> None:
    environment.install("one", family="Family")
    with pytest.raises(BackendOptionError, match=r"'family': kernel 'tyo': takes \['missing', "):
        create("family", kernel="tyo")


def test_a_backend_has_one_variant_without_options_unless_it_says_otherwise(
    toy_backend: type[Any],
) -> None:
    assert list(toy_backend.variants()) == [{}]
    assert toy_backend.select({"splits": 3}) == (toy_backend, {"splits": 3})


# A fresh process


def test_listing_names_in_a_fresh_process_imports_no_backend(environment: Environment) -> None:
    environment.install("stranger", toy="Toy")
    script = f"""
        import sys
        sys.path.insert(0, {str(environment.folder)!r})
        from bcg_core import BackendRegistry
        registry = BackendRegistry()
        print(sorted({{"sdpa", "toy"}} & set(registry.names())))
        print([name for name in sys.modules if name.startswith(("bcg_backends", "plugin_"))])
        print(registry.load("toy").__name__)
    """
    run = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["['sdpa', 'toy']", "[]", "Toy"]
