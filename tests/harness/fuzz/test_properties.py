"""Whatever the composition, the ladder, the order of buckets and the backend: replay is padded eager, bit for bit.

A counter-example is printed as a JSON case, as small as it goes, and as the ``bcg check`` command that replays it.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bcg_backends.sdpa import SDPABackend
from bcg_core import Mode, PrefillBatch, TokenBuckets, create_backend
from bcg_harness import Candidate, Case, Matrix, RandomTokens, Step, bit_equal
from bcg_harness.checks import MECHANISM
from bcg_harness.cli import app
from bcg_harness.fuzz.draw import Bounds
from bcg_harness.fuzz.fuzz import Fuzz
from bcg_harness.fuzz.record import Counterexample
from bcg_harness.probe import Probe
from bcg_harness.stage import Stage
from bcg_harness.testing import ChangesQueries, MaskBackend
from bcg_llama import LlamaModel

UNHURRIED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
BACKENDS = [
    Candidate(name="sdpa", backend=SDPABackend),
    Candidate(name="mask", backend=MaskBackend),
]
SEQUENCES, MOST_NEW, MOST_STEPS = 5, 14, 4
LARGEST_CASE = Case(
    name="largest",
    description="as much as any case that is drawn here: sizes the KV cache",
    steps=(Step(requests=tuple((s, MOST_NEW) for s in range(SEQUENCES))),) * MOST_STEPS,
)

requests = st.lists(
    st.tuples(st.integers(0, SEQUENCES - 1), st.integers(1, MOST_NEW)),
    max_size=SEQUENCES,
    unique_by=lambda request: request[0],
)
steps = st.builds(Step, requests=requests.map(tuple))
cases = st.lists(steps, min_size=1, max_size=MOST_STEPS).map(
    lambda drawn: Case(name="drawn", description="", steps=tuple(drawn))
)
ladders = st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(
    lambda sizes: TokenBuckets(sorted(sizes))
)


class Property:
    """Run compositions on one ladder; all in the same runner, so that each also finds what others left behind."""

    def __init__(
        self,
        model: LlamaModel,
        buckets: Sequence[int],
        checks: Sequence[str],
        *,
        page_size: int = 4,
    ) -> None:
        self.arguments: Any = (
            model,
            [LARGEST_CASE],
            TokenBuckets(buckets),
            RandomTokens(model.spec.vocab_size),
        )
        self.options: Any = {"checks": checks, "page_size": page_size}
        self.matrix = Matrix(*self.arguments, **self.options)

    def holds_for(self, candidate: Candidate, case: Case) -> None:
        """Fail, with the case as JSON, when some check does."""
        bad = self.problems(self.matrix, candidate, case)
        if bad:
            alone = self.problems(Matrix(*self.arguments, **self.options), candidate, case)
            which = (
                "to replay it" if alone else "only after the examples before it, so this may pass"
            )
            pytest.fail(f"{bad}; {which}:\n{self.commands(candidate, case)}")

    def commands(self, candidate: Candidate, case: Case) -> str:
        """Return shell commands that write ``case`` to a file and check it, as far as ``bcg check`` knows the set-up.

        It runs all layers of the model, and a backend that only tests know has to be registered under its name first.
        """
        found = Counterexample(
            backend=candidate.label,
            case=case,
            drawn=case,
            buckets=TokenBuckets(self.matrix.stage.runner.buckets),
            page_size=self.options["page_size"],
            results=(),
            reproduced=True,
        )
        settings = {"model": "tiny", "device": "cpu", "dtype": "float32", "seed": 0}
        command = found.command(Path("drawn.json"), settings)
        return f"cat > drawn.json <<END\n{json.dumps(case.to_json())}\nEND\n{command}\n"

    def problems(self, matrix: Matrix, candidate: Candidate, case: Case) -> list[str]:
        probe = matrix.use(candidate.backend, **candidate.options)
        results = matrix.check_case(candidate.label, probe, case)
        return [f"{each.check}: {each.detail}" for each in results if each.outcome.is_bad]


@pytest.fixture(scope="module", params=[(1,), (3, 4, 30), (16, 50)], ids=str)
def mechanism(request: pytest.FixtureRequest, small_model: LlamaModel) -> Property:
    return Property(small_model, request.param, MECHANISM)


@pytest.fixture(scope="module")
def raw_shape(small_model: LlamaModel) -> Property:
    return Property(small_model, [5, 24], ["raw_shape", "oracle"])


@pytest.mark.parametrize("candidate", BACKENDS, ids=lambda each: each.label)
@settings(UNHURRIED, max_examples=15)
@given(case=cases)
def test_a_replay_is_padded_eager_whatever_the_composition(
    mechanism: Property, candidate: Candidate, case: Case
) -> None:
    mechanism.holds_for(candidate, case)


@settings(UNHURRIED, max_examples=8)
@given(case=cases, buckets=ladders, page_size=st.integers(1, 20))
def test_a_replay_is_padded_eager_whatever_the_ladder_and_page_size(
    small_model: LlamaModel, case: Case, buckets: TokenBuckets, page_size: int
) -> None:
    fresh = Property(small_model, buckets, MECHANISM, page_size=page_size)
    for candidate in BACKENDS:
        fresh.holds_for(candidate, case)


@pytest.mark.parametrize("candidate", BACKENDS, ids=lambda each: each.label)
@settings(UNHURRIED, max_examples=12)
@given(case=cases)
def test_a_replay_is_within_budget_of_the_raw_shape_and_of_the_reference(
    raw_shape: Property, candidate: Candidate, case: Case
) -> None:
    raw_shape.holds_for(candidate, case)


# Backend switches and orders of buckets are no part of a case: these run on a stage.


class Switchboard:
    """Run batches with one of several backends each, on one runner."""

    def __init__(self, model: LlamaModel, buckets: Sequence[int]) -> None:
        self.source = RandomTokens(model.spec.vocab_size)
        self.stage = Stage(model, [LARGEST_CASE], TokenBuckets(buckets), page_size=4)
        self.stage.capture()
        runner = self.stage.runner
        self.probes = [
            Probe(create_backend(each.backend, self.stage.spec, runner.limits, model.spec.device))
            for each in BACKENDS
        ]

    def batches(self, case: Case) -> list[PrefillBatch]:
        """Return the batches of ``case``, each run once, so that later ones find their prefix."""
        self.stage.reset(0)
        made = []
        for step in case.steps:
            made.append(self.stage.batch(step, self.source))
            self.run(made[-1], 0, Mode.EAGER)
        return made

    def run(self, batch: PrefillBatch, backend: int, mode: Mode = Mode.BREAKABLE) -> list[Any]:
        """Return hidden states, logits and the KV cache without its reserved page."""
        probe = self.stage.use(self.probes[backend])
        cached = [sequence.cached for sequence in batch.sequences]
        # Several runs begin from one state of the cache: none finds more to clear than another.
        self.stage.kv_cache.holders.unclean.clear()
        arm = self.stage.run(batch, mode, probe)
        # An earlier batch that runs again does not make the tokens of later ones unknown.
        for sequence, before in zip(batch.sequences, cached, strict=True):
            self.stage.kv_cache.mark_written(sequence, max(sequence.cached, before))
        return [arm.hidden_RD, arm.logits_BV, self.stage.kv_cache.storage_L2PSKH[:, :, 1:].clone()]


@pytest.fixture(scope="module")
def switchboard(small_model: LlamaModel) -> Switchboard:
    return Switchboard(small_model, (3, 10, 32))


@settings(UNHURRIED, max_examples=15)
@given(case=cases, order=st.data())
def test_backends_may_take_turns_from_batch_to_batch(
    switchboard: Switchboard, case: Case, order: st.DataObject
) -> None:
    storage = switchboard.stage.kv_cache.storage_L2PSKH
    for batch in switchboard.batches(case):
        backend = order.draw(st.integers(0, len(BACKENDS) - 1))
        before = storage.clone()
        expected = switchboard.run(batch, backend, Mode.PADDED_EAGER)
        storage.copy_(before)
        replayed = switchboard.run(batch, backend)
        assert all(map(bit_equal, replayed, expected)), json.dumps(case.to_json())


@settings(UNHURRIED, max_examples=15)
@given(case=cases, order=st.data())
def test_results_do_not_depend_on_the_order_of_batches_and_buckets(
    switchboard: Switchboard, case: Case, order: st.DataObject
) -> None:
    batches = switchboard.batches(case)
    first = [switchboard.run(batch, 0)[0] for batch in batches]
    for position in order.draw(st.permutations(range(len(batches)))):
        again = switchboard.run(batches[position], 0)[0]
        assert bit_equal(again, first[position]), json.dumps(case.to_json())


# What a failure leaves in one's hands.


def test_a_counterexample_is_printed_as_a_command_that_replays_it(
    small_model: LlamaModel,
    only_backends: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = Candidate(name="faulty", backend=ChangesQueries)
    attention = Property(small_model, [8], ["attention"])

    @settings(UNHURRIED, phases=[Phase.generate, Phase.shrink], derandomize=True, database=None)
    @given(case=cases)
    def fails(case: Case) -> None:
        attention.holds_for(faulty, case)

    with pytest.raises(BaseException, match="to replay it") as caught:
        fails()
    write, case, _, command = str(caught.value).split("to replay it:\n")[1].splitlines()[:4]
    assert [step["requests"] for step in json.loads(case)["steps"]] == [[[0, 1]]]
    assert write == "cat > drawn.json <<END"
    monkeypatch.chdir(tmp_path)
    Path("drawn.json").write_text(case)
    only_backends(faulty="bcg_harness.testing:ChangesQueries")
    name, *arguments = shlex.split(command)
    result = CliRunner().invoke(app, arguments)
    assert (name, result.exit_code) == ("bcg", 1)
    assert "FAIL faulty / drawn" in result.output
    assert "buckets 8, pages of 4" in result.output


@pytest.mark.parametrize("seed", [0, 1])
def test_random_compositions_of_the_command_pass(make_fuzz: Callable[..., Fuzz], seed: int) -> None:
    """150 of each of two seeds; ``bcg fuzz --cases 10000`` is the long mode."""
    backend = BACKENDS[seed].backend
    tally = make_fuzz(backend, seed=seed, cases=150, bounds=Bounds(most_bucket=32)).run()
    assert tally.counterexamples == []
    assert tally.passed == {backend.name: 150}
