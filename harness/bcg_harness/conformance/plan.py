"""What a run of the kit is about: every test, before the first one runs."""

from dataclasses import dataclass
from pathlib import Path
from warnings import warn

import pytest
import torch

from bcg_core import TokenBuckets
from bcg_harness.candidates import Candidate
from bcg_harness.conformance.subjects import CheckOfCase, KnownFailure, Subject, Unusable
from bcg_harness.errors import HarnessError
from bcg_harness.expected_failures import Expectations, expectations_of
from bcg_harness.json_file import require_writable
from bcg_harness.outcome import CheckResult
from bcg_harness.plugin_options import backends_of, buckets_of, device_of, dtype_of
from bcg_harness.selection import select_cases

_MAX_CONTEXT = 2048
_PAGE_SIZE = 16
"""What cases are sized by when tests are listed: which there are depends on neither."""


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
        debug: watch the runner with every debug tool.
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
    debug: bool
    candidates: tuple[tuple[Candidate, Expectations], ...]
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
        case_names = tuple(config.getoption("--bcg-case"))
        cases = select_cases(case_names, buckets, page_size=_PAGE_SIZE, max_context=_MAX_CONTEXT)
        declared, broken = expectations_of(candidates, cases, buckets)
        return cls(
            device=device_of(config),
            dtype=dtype_of(config),
            model=config.getoption("--bcg-model"),
            seed=config.getoption("--bcg-seed"),
            buckets=buckets,
            page_size=page_size,
            case_names=case_names,
            debug=config.getoption("--bcg-debug"),
            candidates=tuple(declared),
            unusable=(*unusable, *broken),
            report=report,
        )

    def subjects(self) -> list[Subject]:
        """Return a subject for each test, backend by backend, case by case; warns of patterns that match nothing."""
        found: list[Subject] = [Unusable(result=result) for result in self.unusable]
        for candidate, expectations in self.candidates:
            checks = {
                (check, case): CheckOfCase(
                    candidate=candidate,
                    check=check,
                    case=case,
                    expected=expectations.expected(check, case),
                )
                for check, case in expectations.run
            }
            found += checks.values()
            for warning in expectations.warnings():
                warn(pytest.PytestWarning(warning), stacklevel=2)
            found += (
                KnownFailure(
                    known=known,
                    expectations=expectations,
                    checks=tuple(checks[at] for at in expectations.matched(known)),
                )
                for known in expectations.in_force()
            )
        return found
