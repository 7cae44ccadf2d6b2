"""Cases: what is prefilled, in which order, as small records that check, tests and benchmarks share.

A case says nothing of models, backends or tokens. Sequence numbers name requests: one that was seen in an earlier step
of the case goes on behind its cached tokens, which is how prefixes and chunked prefill are written down.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bcg_harness.errors import CaseError


@dataclass(frozen=True, kw_only=True)
class Step:
    """Prefill one batch.

    Attributes:
        requests: (sequence number, new tokens) of each request, in batch order; may be empty.
        checked: False for a step that only prepares the KV cache for later ones.
    """

    requests: tuple[tuple[int, int], ...]
    checked: bool = True

    def __post_init__(self) -> None:
        sequences = [sequence for sequence, _ in self.requests]
        if len(set(sequences)) != len(sequences):
            raise CaseError(
                f"step {list(self.requests)} has a sequence twice: a batch holds each sequence once, "
                "put its next tokens into another step"
            )
        for sequence, tokens in self.requests:
            if sequence < 0 or tokens < 1:
                raise CaseError(
                    f"step has {tokens} tokens for sequence {sequence}: sequence numbers start at 0, and a request "
                    "needs at least one token"
                )

    @property
    def num_tokens(self) -> int:
        """Return R, the new tokens of all requests."""
        return sum(tokens for _, tokens in self.requests)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describe prefills that are run one after the other in one runner.

    Attributes:
        name: short, for tables and ``--case``.
        description: what this case is there to find.
        steps: the batches, in order; at least one is checked.
    """

    name: str
    description: str
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise CaseError("a case needs a name")
        if not any(step.checked for step in self.steps):
            raise CaseError(f"case {self.name!r} checks nothing: give it at least one checked step")

    @property
    def lengths(self) -> dict[int, int]:
        """Return the tokens of each sequence after the last step."""
        return lengths_of(self.steps)

    @property
    def has_prefix(self) -> bool:
        """Tell whether some request has cached tokens before its new ones."""
        return sum(len(step.requests) for step in self.steps) > len(self.lengths)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that ``from_json`` reads."""
        return {
            "name": self.name,
            "description": self.description,
            "steps": [
                {"requests": [list(request) for request in step.requests], "checked": step.checked}
                for step in self.steps
            ],
        }

    @classmethod
    def from_json(cls, raw: Any) -> "Case":
        """Read a JSON object; ``checked`` and ``description`` may be left out.

        Raises CaseError, saying what was found and what was expected.
        """
        if not isinstance(raw, Mapping) or not isinstance(raw.get("steps"), list):
            raise CaseError(f"expected {_SHAPE}, found {json.dumps(raw)[:200]}")
        _refuse_unknown(raw, ("name", "description", "steps"))
        name, description = raw.get("name"), raw.get("description", "")
        if not isinstance(name, str) or not isinstance(description, str):
            raise CaseError(
                f"name and description of a case are strings, found {name!r}, {description!r}"
            )
        return cls(name=name, description=description, steps=tuple(map(_step, raw["steps"])))


_SHAPE = '{"name": "...", "steps": [{"requests": [[sequence, tokens], ...], "checked": true}, ...]}'


def _step(raw: Any) -> Step:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("requests"), list):
        raise CaseError(f"expected a step as in {_SHAPE}, found {json.dumps(raw)[:200]}")
    _refuse_unknown(raw, ("requests", "checked"))
    checked = raw.get("checked", True)
    pairs = raw["requests"]
    if not isinstance(checked, bool) or not all(map(_is_request, pairs)):
        raise CaseError(f"expected a step as in {_SHAPE}, found {json.dumps(raw)[:200]}")
    return Step(requests=tuple((sequence, tokens) for sequence, tokens in pairs), checked=checked)


def _refuse_unknown(raw: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in raw if key not in known]:
        raise CaseError(f"unknown key {unknown[0]!r}; possible are {', '.join(known)}")


def _is_request(raw: Any) -> bool:
    return isinstance(raw, list) and len(raw) == 2 and all(type(number) is int for number in raw)


def read_cases(text: str) -> list[Case]:
    """Read one case, or a list of cases, from JSON text; raises CaseError."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise CaseError(f"no JSON: {error}") from error
    cases = [Case.from_json(item) for item in (raw if isinstance(raw, list) else [raw])]
    if not cases:
        raise CaseError(f"no cases in an empty list; expected {_SHAPE}, or a list of these")
    for number, case in enumerate(cases):
        if case.name in [earlier.name for earlier in cases[:number]]:
            raise CaseError(f"two cases are called {case.name!r}: rename one of them")
    return cases


def lengths_of(steps: Iterable[Step]) -> dict[int, int]:
    """Return the tokens of each sequence after ``steps``."""
    totals: dict[int, int] = {}
    for step in steps:
        for sequence, tokens in step.requests:
            totals[sequence] = totals.get(sequence, 0) + tokens
    return totals


def longest_sequence(cases: Iterable[Case]) -> int:
    """Return the most tokens that a sequence of ``cases`` reaches, 0 without any."""
    return max((length for case in cases for length in case.lengths.values()), default=0)
