"""Serve random batches for long, and look at quiet points whether anything has grown."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from time import perf_counter

from bcg_core import PrefillRunner, TokenBuckets
from bcg_core.errors import PASSED_ON
from bcg_harness.bench.timing import synchronise
from bcg_harness.candidates import Candidate
from bcg_harness.cases import Case, Step
from bcg_harness.checks import MECHANISM
from bcg_harness.matrix import Matrix
from bcg_harness.outcome import CheckResult, Outcome
from bcg_harness.probe import Probe, Trace
from bcg_harness.progress import NoProgress, Progress
from bcg_harness.soak.objects import count_types, frozen
from bcg_harness.soak.quantity import QUANTITIES
from bcg_harness.soak.record import Failure, Tally
from bcg_harness.soak.samples import Samples, number_of_samples
from bcg_harness.soak.traffic import Traffic, Visit
from bcg_harness.tokens import TokenSource
from bcg_llama import LlamaModel


class Soak:
    """Serve batches with backends that take turns on one capture, and read all quantities after every round of them.

    They are read at quiet points: no sequence is alive, every backend has just served the same small batches, the
    device is idle, and garbage is collected. Whatever differs between two such points has been left behind.

    Args:
        model: what to run.
        traffic: what is served.
        candidates: the backends.
        source: gives the token ids.
        replays: batches to serve by replay; what no bucket holds comes on top.
        samples: rounds, and so readings.
        check_every: of so many batches one is compared with padded eager.
        page_size: tokens a KV page.
        runner_type: makes the runner; tests put faulty ones here.
        progress: told about it.

    Raises HarnessError for numbers that do not fit together.

    Attributes:
        tally: what was served so far; complete also after an interrupt.
        samples: the readings so far.
        missing: quantities that cannot be read here, with the reason.
    """

    def __init__(
        self,
        model: LlamaModel,
        traffic: Traffic,
        candidates: Sequence[Candidate],
        source: TokenSource,
        *,
        replays: int,
        samples: int,
        check_every: int,
        page_size: int,
        runner_type: Callable[..., PrefillRunner] = PrefillRunner,
        progress: Progress | None = None,
    ) -> None:
        planned = number_of_samples(samples, replays)
        self.traffic = traffic
        self.replays = replays
        self.check_every = check_every
        self.progress = progress or NoProgress()
        self.tally = Tally()
        self._candidates = candidates
        self._source = source
        self._device = model.spec.device
        self._matrix = Matrix(
            model,
            [traffic.largest],
            TokenBuckets(traffic.buckets),
            source,
            checks=MECHANISM,
            page_size=page_size,
            runner_type=runner_type,
            progress=self.progress,
        )
        reasons = {quantity: quantity.missing(self._device) for quantity in QUANTITIES}
        self.missing = {each.name: reason for each, reason in reasons.items() if reason is not None}
        readable = [quantity for quantity, reason in reasons.items() if reason is None]
        self.samples = Samples(readable, planned)
        self._probes: dict[str, Probe] = {}
        self._steps: list[Step] = []
        self._alive: set[int] = set()
        self._settled: Counter[str] = Counter()

    @property
    def runner(self) -> PrefillRunner:
        """Return the runner, with its counts."""
        return self._matrix.stage.runner

    def run(self) -> Tally:
        """Serve until all is done or something is wrong; returns the tally.

        The largest batches come first, for memory to grow to what they need, and again last; all of these are checked,
        with every backend.
        """
        self._use_all()
        if not self._probes:
            return self.tally
        rounds, started = self.samples.planned, perf_counter()
        try:
            self._extremes()
            self.progress.start("soaking", rounds)
            with frozen():
                for number in range(rounds):
                    done, due = (self.replays * count // rounds for count in (number, number + 1))
                    self._round(number, due - done)
                    self._pause(number)
                    self.samples.take(
                        self._device,
                        replays=self.tally.replays,
                        seconds=perf_counter() - started,
                    )
                    self.progress.advance()
                self.tally.grown = count_types() - self._settled
            self._extremes()
            self._require_counts()
        except _WrongError as error:
            self.tally.failure = error.failure
        return self.tally

    def _use_all(self) -> None:
        """Make all backends, and capture at the first."""
        for each in self._candidates:
            made = self._try_to_use(each)
            if isinstance(made, CheckResult):
                self.tally.unusable.append(made)
            else:
                self._probes[each.label] = made

    def _try_to_use(self, candidate: Candidate) -> Probe | CheckResult:
        label = candidate.label
        if not candidate.selected.capabilities.cached_prefix:
            why_not = "cached_prefix: a soak prefills behind cached tokens"
            return CheckResult.skip(why_not, backend=label, declared=True)
        return self._matrix.try_to_use(label, candidate.backend, **candidate.options)

    def _extremes(self) -> None:
        for number, label in enumerate(self._probes):
            self._begin(number)
            for visit in self.traffic.extremes():
                self._serve(visit, label, checked=visit.step.checked)

    def _round(self, number: int, replays: int) -> None:
        """Serve batches until ``replays`` of them were such as buckets hold."""
        self._begin(number)
        random = Random(f"turns of round {number} of seed {self.traffic.seed}")
        until = self.tally.replays + replays
        for visit in self.traffic.round(number):
            label = random.choice(list(self._probes))
            self._serve(visit, label, checked=self.tally.batches % self.check_every == 0)
            if self.tally.replays >= until:
                return

    def _pause(self, number: int) -> None:
        """Come to a quiet point."""
        # Before the steps of the round are forgotten, which a miscount is reported with.
        self._require_counts()
        self._begin(number)
        for label in self._probes:
            for visit in self.traffic.pulse:
                self._serve(visit, label, checked=False)
        synchronise(self._device)
        gc.collect()
        if number == self.samples.settling:
            self._settled = count_types()

    def _begin(self, seed: int) -> None:
        """Release all sequences, and shuffle the free pages."""
        self._matrix.stage.reset(seed)
        self._alive.clear()

    def _serve(self, visit: Visit, label: str, *, checked: bool) -> None:
        """Serve one batch, release what ends, and raise _WrongError for anything that is not right."""
        # Not as soon as nobody is alive: a miscount is reported with the steps behind it.
        if not self._alive:
            self._steps = []
        self._steps.append(visit.step)
        try:
            results = list(self._results(visit.step, label, checked=checked))
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  # the plug-in's, or the runner's
            results = [CheckResult.broken(error, backend=label)]
        bad = tuple(result for result in results if result.outcome.is_bad)
        if bad:
            raise self._wrong(*bad)
        self._alive |= {sequence for sequence, _ in visit.step.requests}
        self._alive -= set(visit.ended)
        for sequence in visit.ended:
            self._matrix.stage.release(sequence)
        self.tally.sequences += len(visit.ended)
        self.tally.batches += 1
        self.tally.turns[label] += 1
        self.tally.checked[label] += checked

    def _results(self, step: Step, label: str, *, checked: bool) -> Iterator[CheckResult]:
        stage, probe = self._matrix.stage, self._probes[label]
        stage.use(probe)
        batch = stage.batch(step, self._source)
        bucket = stage.expected_bucket(batch)
        if checked:
            stage.spoil(batch)
            case = Case(name="soak", description="", steps=(Step(requests=step.requests),))
            for finding in self._matrix.case_run(case, probe).check(step, batch):
                yield CheckResult.of(finding, backend=label, case=case.name, step=None)
        else:
            probe.trace = Trace()
            # A server waits for the tokens, too.
            self.runner.prefill(batch).next_tokens_B.tolist()
        if bucket is not None:
            self.tally.replays += 1
            self.tally.buckets[bucket] += 1

    def _require_counts(self) -> None:
        """Raise _WrongError where the runner has not replayed what it had to."""
        problem = self.tally.miscount(self.runner.stats.replays)
        if problem is not None:
            failed, who = Outcome.FAILED, "all backends"
            raise self._wrong(
                CheckResult(outcome=failed, backend=who, check="structure", detail=problem)
            )

    def _wrong(self, *results: CheckResult) -> "_WrongError":
        steps = tuple(Step(requests=step.requests) for step in self._steps)
        case = Case(name="soak", description="what a soak served until it failed", steps=steps)
        return _WrongError(
            Failure(
                batch=self.tally.batches, replays=self.tally.replays, results=results, case=case
            )
        )


class _WrongError(Exception):
    """Carry what went wrong to where the run ends."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.results[0].detail)
        self.failure = failure
