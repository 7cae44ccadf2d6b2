"""What a run of the kit is about: every test, before the first one runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from warnings import warn

import pytest
import torch

from bcg_core import TokenBuckets
from bcg_harness.candidates import Candidate
from bcg_harness.cases import Case
from bcg_harness.checks import CHECK_NAMES
from bcg_harness.conformance.expected_failures import (
    ExpectedFailure,
    expected_failures,
    first_match,
)
from bcg_harness.conformance.subjects import CheckOfCase, KnownFailure, Subject, Unusable, applies
from bcg_harness.errors import HarnessError
from bcg_harness.json_file import require_writable
from bcg_harness.outcome import CheckResult, Outcome
from bcg_harness.plugin_options import backends_of, buckets_of, device_of, dtype_of
from bcg_harness.selection import select_cases

_MAX_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what the options of pytest ask for.

    Attributes:
        device: where to run.
        dtype: of model and backends.
        model: as it was asked for; made or loaded later.
        seed: of random weights and tokens.
        buckets: token counts to capture.
        page_size: tokens a KV page; None for what suits the backends.
        case_names: as they were given; none for all.
        cases: what they stand for, for a model of usual context.
        candidates: backends to check, with what each declares as known to fail.
        unusable: why other backends cannot be checked.
        report: where to write results; None for nowhere.
    """

    device: torch.device
    dtype: torch.dtype
    model: str
    seed: int
    buckets: TokenBuckets
    page_size: int | None
    case_names: tuple[str, ...]
    cases: tuple[Case, ...]
    candidates: tuple[tuple[Candidate, tuple[ExpectedFailure, ...]], ...]
    unusable: tuple[CheckResult, ...]
    report: Path | None

    @classmethod
    def of(cls, config: pytest.Config) -> "Plan":
        """Read the options; raises a BcgError for what they ask wrongly."""
        buckets, page_size = buckets_of(config), config.getoption("--bcg-page-size")
        if page_size is not None and page_size < 1:
            raise HarnessError(f"page size {page_size}: a page holds at least one token")
        report = config.getoption("--bcg-report")
        if report is not None:
            report = config.invocation_params.dir / report
            require_writable(report)
        candidates, unusable = backends_of(config)
        if not candidates and not unusable:
            raise HarnessError(
                "no attention backend is registered: install a plug-in, or name a class with --bcg-backend-class"
            )
        declared = []
        for candidate in candidates:
            try:
                declared.append((candidate, expected_failures(candidate)))
            except HarnessError as error:
                unusable.append(
                    CheckResult(outcome=Outcome.ERROR, backend=candidate.label, detail=str(error))
                )
            except (Exception, SystemExit) as error:  # noqa: BLE001  # a broken plug-in hides no other
                unusable.append(CheckResult.broken(error, backend=candidate.label))
        case_names = tuple(config.getoption("--bcg-case"))
        return cls(
            device=device_of(config),
            dtype=dtype_of(config),
            model=config.getoption("--bcg-model"),
            seed=config.getoption("--bcg-seed"),
            buckets=buckets,
            page_size=page_size,
            case_names=case_names,
            cases=tuple(select_cases(case_names, buckets, max_context=_MAX_CONTEXT)),
            candidates=tuple(declared),
            unusable=tuple(unusable),
            report=report,
        )

    def subjects(self) -> list[Subject]:
        """Return a subject for each test, backend by backend, case by case; warns of patterns that match nothing."""
        found: list[Subject] = [Unusable(result=result) for result in self.unusable]
        for candidate, expected in self.candidates:
            checks = [
                CheckOfCase(
                    candidate=candidate,
                    check=check,
                    case=case,
                    expected=first_match(expected, check, case),
                )
                for check, case in self._pairs(self.cases)
            ]
            found += checks
            found += self._known_failures(candidate, expected, checks)
        return found

    def _known_failures(
        self,
        candidate: Candidate,
        expected: tuple[ExpectedFailure, ...],
        checks: Sequence[CheckOfCase],
    ) -> Iterator[KnownFailure]:
        # With all built-in cases, as a run of some must take no pattern over the others for stale.
        builtin = select_cases((), self.buckets, max_context=_MAX_CONTEXT)
        possible = {*self._pairs(self.cases), *self._pairs(builtin)}
        for known in expected:
            chosen = tuple(test for test in checks if known.matches(test.check, test.case))
            matching = sum(known.matches(check, case) for check, case in possible)
            if not matching:
                warning = (
                    f"expected failure {known.pattern!r} of {candidate.label} matches no test: patterns are over "
                    "'check-case', such as 'raw_shape-*' or 'oracle-two-requests'"
                )
                warn(pytest.PytestWarning(warning), stacklevel=2)
                continue
            yield KnownFailure(
                candidate=candidate,
                known=known,
                checks=chosen,
                complete=len(chosen) == matching,
            )

    def _pairs(self, cases: Sequence[Case]) -> list[tuple[str, str]]:
        return [
            (check, case.name)
            for case in cases
            for check in CHECK_NAMES
            if applies(check, case, self.buckets)
        ]
