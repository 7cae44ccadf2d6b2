"""Run a plan through the matrix, and turn what fails into small cases that fail alone."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from bcg_core import PrefillRunner
from bcg_harness.bench.timing import require_device
from bcg_harness.candidates import Candidate
from bcg_harness.cases import Case
from bcg_harness.errors import DeviceLostError
from bcg_harness.fuzz.plan import Block, Plan
from bcg_harness.fuzz.record import Counterexample, Tally, failed_checks
from bcg_harness.fuzz.shrink import MOST_ATTEMPTS, join, shrink
from bcg_harness.matrix import Matrix
from bcg_harness.outcome import CheckResult, Outcome
from bcg_harness.progress import NoProgress, Progress
from bcg_harness.tokens import TokenSource
from bcg_llama import LlamaModel

_HISTORY = 16
"""Cases before a failing one that are tried as its cause when it does not fail alone."""


class Fuzz:
    """Check every case of a plan with every candidate: case by case, so that backends take turns on one capture.

    Args:
        model: what to run.
        plan: what is drawn.
        candidates: the backends.
        source: gives the token ids.
        checks: names of the checks to make.
        most_failures: counter-examples after which the run ends.
        most_attempts: runs that shrinking one of them may cost.
        runner_type: makes the runners; tests put faulty ones here.
        progress: told about it.

    Attributes:
        tally: what became of the cases so far; complete also after an interrupt.
    """

    def __init__(
        self,
        model: LlamaModel,
        plan: Plan,
        candidates: Sequence[Candidate],
        source: TokenSource,
        *,
        checks: Collection[str],
        most_failures: int = 1,
        most_attempts: int = MOST_ATTEMPTS,
        runner_type: Callable[..., PrefillRunner] = PrefillRunner,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.candidates = list(candidates)
        self.source = source
        self.checks = checks
        self.most_failures = most_failures
        self.most_attempts = most_attempts
        self.progress = progress or NoProgress()
        self.tally = Tally()
        self._runner_type = runner_type

    def run(self) -> Tally:
        """Run until all is done, enough has failed, or the GPU is lost; returns the tally."""
        self.progress.start("random compositions", self.plan.cases)
        try:
            for block in self.plan.blocks():
                self._run_block(block)
                if self._enough:
                    break
        except DeviceLostError as error:
            self.tally.lost = str(error)
        return self.tally

    @property
    def _enough(self) -> bool:
        return len(self.tally.counterexamples) >= self.most_failures or not self.candidates

    def _run_block(self, block: Block) -> None:
        matrix = self._matrix(block, block.cases)
        runs = [
            (each, matrix.each_case(each.label, each.backend, **each.options))
            for each in self.candidates
        ]
        for number, case in enumerate(block.cases):
            history = block.cases[max(0, number - _HISTORY) : number]
            for candidate, run in runs:
                self._judge(block, candidate, history, case, next(run, []))
                if self._enough:
                    return
            self.tally.finished += 1
            self.progress.advance()

    def _judge(
        self,
        block: Block,
        candidate: Candidate,
        history: Sequence[Case],
        case: Case,
        results: list[CheckResult],
    ) -> None:
        """Count ``results``, and keep what failed."""
        tally, label = self.tally, candidate.label
        outcomes = Counter(result.outcome for result in results)
        tally.outcomes += outcomes
        tally.steps += len({result.step for result in results if result.step is not None})
        tally.skipped.update(
            (label, result.detail) for result in results if result.outcome is Outcome.SKIPPED
        )
        bad = tuple(result for result in results if result.outcome.is_bad)
        if not bad:
            tally.passed.update([label] * (outcomes[Outcome.PASSED] > 0))
        elif bad[0].case is None:
            # The backend cannot be made or captured with: no composition has a part in it.
            tally.errors += bad
            self.candidates.remove(candidate)
        else:
            found = Counterexample(
                backend=label,
                case=case,
                drawn=case,
                buckets=block.buckets,
                page_size=block.page_size,
                results=bad,
                reproduced=False,
            )
            tally.counterexamples.append(found)
            require_device(self.model.spec.device, f"case {case.name} with {label}")
            tally.counterexamples[-1] = self._reproduce(found, block, candidate, history)

    def _reproduce(
        self, found: Counterexample, block: Block, candidate: Candidate, history: Sequence[Case]
    ) -> Counterexample:
        """Look for the shortest history behind which the case fails on a fresh runner, and shrink all of it.

        It must fail in a check in which the drawn case failed, so that it is still the same fault.
        """

        def failures(case: Case) -> tuple[CheckResult, ...]:
            matrix = self._matrix(block, [case])
            results = matrix.check(candidate.label, candidate.backend, **candidate.options)
            bad = tuple(result for result in results if result.outcome.is_bad)
            return bad if not set(failed_checks(bad)).isdisjoint(found.checks) else ()

        past = list(history)
        for length in (0, 1, 2, 4, 8, 16):
            case = join([*past[max(0, len(past) - length) :], found.drawn])
            if failures(case):
                smallest = shrink(
                    case, lambda smaller: bool(failures(smaller)), attempts=self.most_attempts
                )
                return replace(found, case=smallest, results=failures(smallest), reproduced=True)
            if length >= len(past):
                break
        return found

    def _matrix(self, block: Block, cases: Sequence[Case]) -> Matrix:
        return Matrix(
            self.model,
            cases,
            block.buckets,
            self.source,
            checks=self.checks,
            page_size=block.page_size,
            runner_type=self._runner_type,
        )
