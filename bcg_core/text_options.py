"""Options of a backend that arrive as text, as on a command line, turned into what its constructor takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature, unwrap
from types import SimpleNamespace
from typing import Any, get_type_hints

from bcg_core.backend import AttentionBackend
from bcg_core.errors import BackendOptionError
from bcg_core.option_forms import Form, form_of, option_text
from bcg_core.registry import select_class


def read_options(
    asked: str, backend: type[AttentionBackend], texts: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options that ``texts`` stand for, to be passed to ``create_backend``.

    What ``select`` leaves is typed by the constructor that names it, of the selected class or of one that it derives
    from and passes ``**options`` on to: by the annotation, without one by the type of the default, and without that it
    stays text. What ``select`` takes itself has no annotation: there a value that ``variants`` names, or the type of
    those named, decides.

    Raises BackendOptionError, under the name ``asked``, for options that the backend does not take, and for text that
    does not fit, with what is expected and an example.
    """
    hinted = {key: _hinted(backend, key, text) for key, text in texts.items()}
    selected, left = select_class(asked, backend, hinted)
    typed = {
        key: _fitting(asked, _taker(selected, key), texts[key], hinted[key])
        for key in left
        if key in texts
    }
    return {**hinted, **typed}


@dataclass(frozen=True, kw_only=True)
class _Taker:
    """Hold the parameter of a constructor that takes an option.

    Attributes:
        option: its name.
        annotation: evaluated; ``Parameter.empty`` where there is none, or none that can be evaluated.
        default: ``Parameter.empty`` where there is none.
    """

    option: str
    annotation: Any = Parameter.empty
    default: Any = Parameter.empty

    @property
    def is_annotated(self) -> bool:
        """Tell whether the annotation says anything."""
        return self.annotation not in (Parameter.empty, Any, object)

    @property
    def form(self) -> Form | None:
        """Return how values are written; None where nothing says so, or none can be."""
        if self.is_annotated:
            return form_of(self.annotation)
        return None if self.default in (Parameter.empty, None) else form_of(type(self.default))

    @property
    def example(self) -> str:
        """Return text that fits: the default, if there is one."""
        if self.default not in (Parameter.empty, None):
            return option_text(self.default)
        return self.form.example if self.form else ""


def _fitting(asked: str, taker: _Taker, text: str, hinted: Any) -> Any:
    form, option = taker.form, taker.option
    if form is None:
        if taker.is_annotated:
            raise BackendOptionError(
                asked,
                f"option {option} is {text!r}, but its type {taker.annotation} cannot be given as text: make the "
                "backend in Python",
            )
        return hinted
    try:
        return form.read(text)
    except ValueError as error:
        raise BackendOptionError(
            asked,
            f"option {option} is {text!r}, expected {form.words}, as in {asked}[{option}={taker.example}]",
        ) from error


def _hinted(backend: type[AttentionBackend], key: str, text: str) -> Any:
    """Return what ``text`` stands for where ``select`` asks; the text itself where nothing says."""
    named = [options[key] for options in backend.variants() if key in options]
    for value in named:
        if option_text(value) == text:
            return value
    forms = [form_of(type(value)) for value in named] or [_taker(backend, key).form]
    for form in filter(None, forms):
        try:
            return form.read(text)
        except ValueError:
            continue
    return text


def _taker(backend: type[AttentionBackend], option: str) -> _Taker:
    """Return the parameter that takes ``option``: of the first constructor that names it, or does not pass it on."""
    for owner in backend.__mro__:
        constructor = vars(owner).get("__init__")
        if constructor is None:
            continue
        parameters = signature(constructor).parameters
        named = parameters.get(option)
        rest = next((p for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD), None)
        if found := named or rest:
            annotation = _evaluated(found.annotation, constructor)
            taker = _Taker(option=option, annotation=annotation, default=found.default)
            if found is named or taker.is_annotated:
                return taker
        else:
            break
    return _Taker(option=option)


def _evaluated(annotation: Any, constructor: Callable[..., Any]) -> Any:
    """Evaluate an annotation that may be text; ``Parameter.empty`` where it names what type checkers alone import."""
    if annotation is Parameter.empty:
        return annotation
    # One at a time: an annotation that cannot be evaluated says nothing of the others.
    holder = SimpleNamespace(__annotations__={"option": annotation})
    try:
        names = getattr(unwrap(constructor), "__globals__", {})
        return get_type_hints(holder, globalns=names)["option"]
    except Exception:  # noqa: BLE001  # the plug-in's expression, whatever it raises
        return Parameter.empty
