"""Run each case of each backend once, at its first test, and keep what was found for the other tests."""

from collections.abc import Mapping
from time import perf_counter

import torch

from bcg_core import negotiate_page_size
from bcg_harness.candidates import Candidate
from bcg_harness.cases import Case
from bcg_harness.conformance.meanings import MEANINGS
from bcg_harness.conformance.plan import Plan
from bcg_harness.conformance.verdict import Verdict
from bcg_harness.matrix import Matrix
from bcg_harness.memory import has_to_fit
from bcg_harness.models import resolve_model
from bcg_harness.outcome import CheckResult
from bcg_harness.probe import Probe
from bcg_harness.selection import select_cases
from bcg_harness.untested import Untested
from bcg_harness.watching import runner_type


class Kit:
    """Judge backends by the correctness matrix, case by case as tests ask for them.

    Attributes:
        plan: what was asked for.
        started: when the run began.
        cases: by name, once prepared.
        page_size: tokens a KV page, once prepared.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.started = perf_counter()
        self.cases: dict[str, Case] = {}
        self.page_size = plan.page_size or negotiate_page_size(
            candidate.selected.capabilities for candidate, _ in plan.candidates
        )
        self._matrix: Matrix | None = None
        self._probes: dict[str, Probe | Verdict] = {}
        self._results: dict[tuple[str, str], list[CheckResult]] = {}

    def prepare(self) -> Matrix:
        """Make or load the model, once, and return its matrix; nothing is captured yet.

        Raises a BcgError when there is no such model, or no room for it.
        """
        if self._matrix is None:
            plan = self.plan
            if plan.device.type == "cuda" and plan.device.index is not None:
                torch.cuda.set_device(plan.device)
            resolved = resolve_model(
                plan.model, dtype=plan.dtype, device=plan.device, seed=plan.seed
            )
            cases = select_cases(
                plan.case_names,
                plan.buckets,
                page_size=self.page_size,
                max_context=resolved.model.spec.max_positions,
            )
            self.cases = {case.name: case for case in cases}
            with has_to_fit(
                "the KV cache", hint="choose smaller --bcg-buckets or fewer --bcg-case"
            ):
                self._matrix = Matrix(
                    resolved.model,
                    cases,
                    plan.buckets,
                    resolved.token_source(None, seed=plan.seed),
                    page_size=self.page_size,
                    runner_type=runner_type(debug=plan.debug),
                )
        return self._matrix

    @property
    def untested(self) -> Mapping[str, Untested]:
        """Return what each backend that was used declares beyond what is tested here."""
        return {} if self._matrix is None else self._matrix.untested

    def verdict(self, candidate: Candidate, check: str, case: str) -> Verdict:
        """Say what ``check`` found in ``case`` with ``candidate``, which runs now unless it has been run before."""
        probe = self._probe(candidate)
        if isinstance(probe, Verdict):
            return probe
        key = candidate.label, case
        if key not in self._results:
            matrix = self.prepare()
            self._results[key] = matrix.check_case(candidate.label, probe, self.cases[case])
        results = self._results[key]
        for result in results:
            if result.check is None:
                return Verdict.of_whole(result)
        return Verdict.of_steps(
            [result for result in results if result.check == check], meaning=MEANINGS[check]
        )

    def _probe(self, candidate: Candidate) -> Probe | Verdict:
        """Make and warm up the backend, once; returns why not when that is not possible.

        Tests come backend by backend: what was made besides those before is released.
        """
        label = candidate.label
        if label not in self._probes:
            matrix = self.prepare()
            for before in self._probes.values():
                if isinstance(before, Probe):
                    matrix.release(before)
            found = matrix.try_to_use(label, candidate.backend, **candidate.options)
            self._probes[label] = found if isinstance(found, Probe) else Verdict.of_whole(found)
        return self._probes[label]
