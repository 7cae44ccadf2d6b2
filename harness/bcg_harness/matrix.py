"""The correctness matrix: cases times backends on one model, captured once."""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendUnavailableError,
    CaptureReport,
    PrefillModel,
    PrefillRunner,
    SegmentEngine,
    TokenBuckets,
    UnsupportedSpecError,
    create_backend,
)
from bcg_core.errors import PASSED_ON
from bcg_harness.case_run import CaseRun
from bcg_harness.cases import Case, longest_sequence
from bcg_harness.checks import CHECK_NAMES, REFERENCED
from bcg_harness.companions import Companions
from bcg_harness.errors import HarnessError
from bcg_harness.oracle import HiddenOracle
from bcg_harness.outcome import CheckResult
from bcg_harness.probe import Probe
from bcg_harness.progress import NoProgress, Progress
from bcg_harness.reference import LlamaReference
from bcg_harness.stage import Stage
from bcg_harness.tokens import TokenSource
from bcg_harness.untested import Untested
from bcg_llama import LlamaModel

_LEAST_DATA = 256
"""Tokens of the sequence that budgets are derived from when the cases have none as long."""


class Matrix:
    """Check attention backends on one model. Captures once and computes the references once, for all backends.

    Args:
        model: what the references are computed from, and what runs unless ``subject`` is given.
        cases: what will be checked; they size the KV cache. A case that needs more positions than the model has is
            skipped.
        buckets: token counts to capture.
        source: gives the token ids.
        checks: names of the checks to make; without those that need it, no reference is computed.
        subject: the model to run; tests put faulty ones here.
        page_size: tokens a KV page.
        runner_type: makes the runner; tests put faulty ones here.
        engine: records the segments; default is the one for the model's device.
        progress: told about long work.

    Attributes:
        stage: the runner, with everything around it.
        capture_report: what was captured; None before a backend has been checked.
        notes: what the backends that were checked say of themselves.
        untested: what each of them declares beyond what is checked here.
    """

    def __init__(
        self,
        model: LlamaModel,
        cases: Sequence[Case],
        buckets: TokenBuckets,
        source: TokenSource,
        *,
        checks: Collection[str] = CHECK_NAMES,
        subject: PrefillModel | None = None,
        page_size: int = 16,
        runner_type: Callable[..., PrefillRunner] = PrefillRunner,
        engine: SegmentEngine | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not cases:
            raise HarnessError("no cases to check: name at least one")
        self.model = model
        self.cases = tuple(cases)
        self.source = source
        self.checks = frozenset(checks)
        self.progress = progress or NoProgress()
        self.capture_report: CaptureReport | None = None
        self.notes: dict[str, list[str]] = {}
        self.untested: dict[str, Untested] = {}
        self._oracle: HiddenOracle | None = None
        self._probes: dict[tuple[type[AttentionBackend], str], Probe] = {}
        self._makers: dict[Probe, Callable[[], AttentionBackend]] = {}
        self._companions: dict[Probe, Companions] = {}
        self._fitting = [case for case in cases if self._too_long(case) is None]
        self.stage = Stage(
            subject or model,
            self._fitting,
            buckets,
            page_size=page_size,
            runner_type=runner_type,
            engine=engine,
        )

    @property
    def spec(self) -> AttentionSpec:
        """Return the attention that backends are asked to serve."""
        return self.stage.spec

    def check(
        self, name: str, backend: type[AttentionBackend], **options: Any
    ) -> list[CheckResult]:
        """Run all cases with ``backend``, made with ``options``; results call it ``name``.

        A backend that cannot serve this model is skipped with its reason. What is raised in a case becomes an error of
        that case, and the next one runs; what is raised before, in a capture for instance, an error of the backend.
        """
        return [
            result for of_case in self.each_case(name, backend, **options) for result in of_case
        ]

    def each_case(
        self, name: str, backend: type[AttentionBackend], **options: Any
    ) -> Iterator[list[CheckResult]]:
        """Do what ``check`` does, and yield the results case by case; one list when the backend cannot be used.

        Backends may take turns: each keeps its companions until its own cases are done, or nobody asks for more.
        """
        probe = self.try_to_use(name, backend, **options)
        if isinstance(probe, CheckResult):
            yield [probe]
            return
        self.progress.start(name, len(self.cases))
        try:
            for case in self.cases:
                yield self.check_case(name, probe, case)
                self.progress.advance()
        finally:
            self.release(probe)

    def try_to_use(
        self, name: str, backend: type[AttentionBackend], **options: Any
    ) -> Probe | CheckResult:
        """Do what ``use`` does, and keep the backend's notes under ``name``; returns why not when it cannot be used."""
        try:
            probe = self.use(backend, **options)
            self.notes[name] = probe.inner.notes()
            self.untested[name] = Untested.of(probe.capabilities, self.spec, probe.device)
        except BackendUnavailableError as error:
            return CheckResult.skip(error.reason, backend=name, declared=False)
        except UnsupportedSpecError as error:
            return CheckResult.skip(error.reason, backend=name, declared=True)
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  # the plug-in's, whatever it is
            return CheckResult.broken(error, backend=name)
        return probe

    def use(self, backend: type[AttentionBackend], **options: Any) -> Probe:
        """Make ``backend`` with ``options``, once, and return it in a probe.

        Before the first, captures and computes the references. Raises what ``bcg_core.create_backend`` raises, and
        whatever the constructor, a warm-up or a capture does.
        """
        key = backend, repr(sorted(options.items()))
        if key not in self._probes:
            limits, device = self.stage.runner.limits, self.stage.kv_cache.device
            make = partial(create_backend, backend, self.spec, limits, device, **options)
            made = make()
            self._prepare(made)
            self.progress.start(f"warming up {made.name}", 1)
            probe = self._probes[key] = self.stage.use(Probe(made))
            self._makers[probe] = make
        return self._probes[key]

    def check_case(self, name: str, probe: Probe, case: Case) -> list[CheckResult]:
        """Run one of ``cases`` with the backend in ``probe``, which results call ``name``.

        What checks make besides the backend is kept for its next case: ``release`` it behind the last.
        """
        if (too_long := self._too_long(case)) is not None:
            return [CheckResult.skip(too_long, backend=name, case=case.name, declared=False)]
        if case.has_prefix and not probe.capabilities.cached_prefix:
            why_not = "cached_prefix: the backend declares that it serves no cached prefix"
            return [CheckResult.skip(why_not, backend=name, case=case.name, declared=True)]
        run = self.case_run(case, probe)
        results = []
        try:
            self.stage.use(probe)
            for step, finding in run.findings(seed=zlib.crc32(case.name.encode())):
                results.append(CheckResult.of(finding, backend=name, case=case.name, step=step))
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  # likewise; the runner goes on
            results.append(
                CheckResult.broken(error, backend=name, case=case.name, step=run.position)
            )
        return results

    def case_run(self, case: Case, probe: Probe) -> CaseRun:
        """Return a run of ``case`` with the backend in ``probe``, which has done nothing yet."""
        return CaseRun(
            case,
            self.stage,
            probe,
            self._oracle,
            self.source,
            self.checks,
            self._companions_of(probe),
        )

    def release(self, probe: Probe) -> None:
        """Drop what was made besides the backend in ``probe``, if anything; its next case makes it anew."""
        companions = self._companions.pop(probe, None)
        if companions is not None:
            companions.release()

    def _companions_of(self, probe: Probe) -> Companions:
        """Return what belongs to the backend in ``probe``; nothing is made before a check asks for it."""
        if probe not in self._companions:
            self._companions[probe] = Companions(self.stage, self._makers[probe])
        return self._companions[probe]

    def _too_long(self, case: Case) -> str | None:
        needed, possible = longest_sequence([case]), self.model.spec.max_positions
        if needed <= possible:
            return None
        return f"max_positions: the case needs {needed} positions, the model has {possible}"

    def _prepare(self, backend: AttentionBackend) -> None:
        """Compute the references and capture, at first use: once it is certain that they are needed.

        A backend that declares itself non-deterministic is held to a budget in every check.
        """
        needed = not backend.capabilities.deterministic or not REFERENCED.isdisjoint(self.checks)
        if self._oracle is None and needed:
            # One sequence of some length in any case, so that there is enough data to derive budgets from.
            lengths = {0: min(_LEAST_DATA, self.model.spec.max_positions)}
            for case in self._fitting:
                for sequence, length in case.lengths.items():
                    lengths[sequence] = max(length, lengths.get(sequence, 0))
            self.progress.start("computing references", len(lengths))
            self._oracle = HiddenOracle(
                LlamaReference(self.model),
                self.source,
                lengths,
                self.model.spec.dtype,
                self.progress.advance,
            )
        if self.capture_report is None:
            self.progress.start("capturing", 2 * len(self.stage.runner.buckets))
            self.capture_report = self.stage.capture(lambda done, total: self.progress.advance())
