"""The names that tensors of a checkpoint go by, and what wrappers make of them.

A name is taken as transformers takes it: with or without the leading ``model.``. A wrapper that was saved along with
its model puts its own words into every name; transformers leaves such tensors out, so they are refused with the way to
save the model inside.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from types import MappingProxyType

from bcg_core.errors import CheckpointError

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_BASE = "model."
_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "_orig_mod.": "torch.compile: save the model that was compiled (model._orig_mod)",
        "_fsdp_wrapped_module.": "FSDP: save a full state dict",
        "_checkpoint_wrapped_module.": "activation checkpointing: save the model inside",
        "base_model.model.": "PEFT: save model.merge_and_unload()",
        "base_layer.": "PEFT, with adapters that are not merged: save model.merge_and_unload()",
        "module.": "DataParallel: save model.module",
    }
)
"""What a wrapper adds to names, and the way to save without."""

_COMPARED = 8
"""For how many missing tensors a close name is looked for."""
_SHOWN = 3
"""How many unknown names are shown where none is close."""


def renamed(stored: Iterable[str], expected: Iterable[str], *, tied: bool) -> dict[str, str]:
    """Return the name in ``expected`` of each stored tensor, or its own where there is none.

    The head of a ``tied`` model that stores no embedding is its embedding. Raises CheckpointError for two tensors that
    mean the same one.
    """
    known = {*expected, HEAD}
    names = {name: _as_expected(name, known) for name in stored}
    if tied and EMBEDDING not in names.values():
        names = {name: EMBEDDING if new == HEAD else new for name, new in names.items()}
    meant: dict[str, str] = {}
    for name, new in names.items():
        if new in meant:
            raise CheckpointError(f"{meant[new]} and {name} are both {new}: keep one of them")
        meant[new] = name
    return names


def other_names(missing: AbstractSet[str], unknown: AbstractSet[str]) -> str:
    """Return, for an error message, under which ``unknown`` names tensors that are missing seem to be stored."""
    plain = {_as_expected(_unwrapped(name), missing): name for name in unknown}
    if wrapped := sorted(missing & plain.keys()):
        example = plain[wrapped[0]]
        ways = "; ".join(way for words, way in _WRAPPERS.items() if f".{words}" in f".{example}")
        return f"; {len(wrapped)} of them stored under names of a wrapper, such as {example} for {wrapped[0]} ({ways})"
    for name in sorted(missing)[:_COMPARED]:
        if close := get_close_matches(name, sorted(unknown), n=1, cutoff=0.8):
            return f"; {close[0]} is stored, which no Llama has and which is close to {name}"
    first = ", ".join(sorted(unknown)[:_SHOWN])
    return f"; stored are {first}{', ...' if len(unknown) > _SHOWN else ''}" if unknown else ""


def _as_expected(name: str, expected: AbstractSet[str]) -> str:
    if name in expected:
        return name
    if name.removeprefix(_BASE) in expected:
        return name.removeprefix(_BASE)
    return _BASE + name if _BASE + name in expected else name


def _unwrapped(name: str) -> str:
    name = f".{name}"
    for words in _WRAPPERS:
        name = name.replace(f".{words}", ".")
    return name.removeprefix(".")
