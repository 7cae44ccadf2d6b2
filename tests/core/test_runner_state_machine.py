"""A runner under any sequence of calls, failures among them, against a plain eager runner over a cache of its own.

Shape letters: R real tokens.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from bcg_core import (
    Admission,
    AttentionBackend,
    BatchError,
    CaptureError,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillResult,
    PrefillRunner,
    UnknownBackendError,
)

Make = Callable[..., Any]

SEQUENCES, MOST_NEW, MOST_CACHED = 3, 12, 40
requests = st.lists(
    st.tuples(st.integers(0, SEQUENCES - 1), st.integers(1, MOST_NEW)),
    min_size=1,
    max_size=SEQUENCES,
    unique_by=lambda request: request[0],
)


class MistakeError(Exception):
    """What a test raises on purpose."""


@dataclass
class Request:
    """One request, with its pages in the runner under test and in the plain one, and all its tokens so far."""

    own: KVSequence = field(default_factory=KVSequence)
    plain: KVSequence = field(default_factory=KVSequence)
    tokens: list[int] = field(default_factory=list)


class RunnerMachine(RuleBasedStateMachine):
    """Capture, prefill, fail, switch and release in any order."""

    runner_type: type[PrefillRunner] = PrefillRunner
    model_type: type[Any]
    backend_type: type[Any]
    make_backend: Make

    def make_runner(self, runner_type: type[PrefillRunner], model: Any) -> PrefillRunner:
        cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
        backend = self.make_backend(self.backend_type)
        return runner_type(model, cache, backend, buckets=[4, 16], max_requests=8)

    @initialize(captured=st.booleans())
    def begin(self, captured: bool) -> None:
        self.model = self.model_type()
        self.runner = self.make_runner(self.runner_type, self.model)
        self.plain = self.make_runner(PrefillRunner, self.model_type())
        self.backends = [self.runner.backend, self.make_backend(self.backend_type)]
        self.requests = [Request() for _ in range(SEQUENCES)]
        self.random = torch.Generator().manual_seed(0)
        self.captured = False
        self.expected: dict[str, Counter[Any]] = {
            "replays": Counter(),
            "fallbacks": Counter(),
            "requested": Counter(),
        }
        if captured:
            self.capture()

    # What a caller does

    @rule()
    def capture(self) -> None:
        if self.captured:
            with pytest.raises(CaptureError, match=r"call release\(\) first"):
                self.runner.capture()
            return
        report = self.runner.capture()
        assert [(each.bucket, each.breaks) for each in report.buckets] == [(16, 2), (4, 2)]
        self.captured = True

    @rule()
    def release(self) -> None:
        self.runner.release()
        self.captured = False

    @rule(wanted=requests, mode=st.sampled_from(Mode))
    def prefill(self, wanted: list[tuple[int, int]], mode: Mode) -> None:
        batch, tokens = self.batch(wanted)
        result = self.runner.prefill(batch, mode=mode)
        self.count(mode, batch.num_tokens)
        self.assert_right(result, tokens)

    @rule(mode=st.sampled_from(Mode))
    def prefill_nothing(self, mode: Mode) -> None:
        batch = PrefillBatch.from_chunks([], self.runner.kv_cache)
        assert self.runner.prefill(batch, mode=mode).admission.reason == "no requests"
        self.count(mode, 0)

    @precondition(lambda self: self.captured)
    @rule(wanted=requests)
    def replay_has_the_bits_of_padded_eager(self, wanted: list[tuple[int, int]]) -> None:
        batch, tokens = self.batch(wanted)
        padded = self.runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD.clone()
        self.count(Mode.PADDED_EAGER, batch.num_tokens)
        for sequence, prefix in zip(batch.sequences, batch.prefix_lens, strict=True):
            sequence.cached = prefix
        result = self.runner.prefill(batch)
        self.count(Mode.BREAKABLE, batch.num_tokens)
        assert torch.equal(result.hidden_RD, padded)
        self.assert_right(result, tokens)

    @rule(which=st.integers(0, 1))
    def switch_backend(self, which: int) -> None:
        assert self.runner.use_backend(self.backends[which]) is self.backends[which]

    @rule(which=st.integers(0, SEQUENCES - 1))
    def end_a_request(self, which: int) -> None:
        request = self.requests[which]
        self.runner.kv_cache.free(request.own)
        self.plain.kv_cache.free(request.plain)
        self.requests[which] = Request()

    # What goes wrong; afterwards everything is as it was, and the next call works.

    @rule(wanted=requests, mode=st.sampled_from(Mode), layer=st.integers(0, 1))
    def fail_in_the_backend(self, wanted: list[tuple[int, int]], mode: Mode, layer: int) -> None:
        backend: Any = self.runner.backend

        def fail(at: int) -> None:
            if at == layer:
                raise MistakeError

        backend.before_forward = fail
        self.fail(wanted, mode=mode)
        backend.before_forward = lambda layer: None

    @rule(wanted=requests)
    def fail_in_the_sampler(self, wanted: list[tuple[int, int]]) -> None:
        def sample(logits_BV: Tensor) -> Tensor:
            raise MistakeError

        self.fail(wanted, sample=sample)

    @rule(wanted=requests)
    def fail_while_preparing(self, wanted: list[tuple[int, int]]) -> None:
        backend: Any = self.runner.backend

        def prepare(batch: PrefillBatch) -> None:
            raise MistakeError

        backend.init_forward_metadata = prepare
        self.fail(wanted)
        del backend.init_forward_metadata

    @precondition(lambda self: not self.captured)
    @rule(after=st.integers(0, 3))
    def fail_to_capture(self, after: int) -> None:
        forward, calls = self.model.forward, []

        def fail(*arguments: Any) -> Tensor:
            calls.append(1)
            if len(calls) > after:
                raise MistakeError
            result: Tensor = forward(*arguments)
            return result

        self.model.forward = fail
        with pytest.raises(MistakeError):
            self.runner.capture()
        del self.model.forward
        assert self.runner.graphs == {}

    @rule()
    def switch_to_nobody(self) -> None:
        backend = self.runner.backend
        with pytest.raises(UnknownBackendError):
            self.runner.use_backend("nobody")
        assert self.runner.backend is backend

    @precondition(lambda self: any(request.own.cached for request in self.requests))
    @rule()
    def refuse_a_batch_made_for_more_than_is_cached(self) -> None:
        request = next(request for request in self.requests if request.own.cached)
        chunk = Chunk(token_ids=[1], sequence=request.own)
        batch = PrefillBatch.from_chunks([chunk], self.runner.kv_cache)
        cached, request.own.cached = request.own.cached, request.own.cached - 1
        with pytest.raises(BatchError, match="build the batch again"):
            self.runner.prefill(batch)
        request.own.cached = cached

    # What always holds

    @invariant()
    def stats_add_up(self) -> None:
        stats = self.runner.stats
        counted = {name: getattr(stats, name) for name in self.expected}
        assert counted == self.expected

    @invariant()
    def cached_lengths_are_those_of_what_succeeded(self) -> None:
        cached = [request.own.cached for request in self.requests]
        assert cached == [len(request.tokens) for request in self.requests]

    @invariant()
    def graphs_are_there_when_captured(self) -> None:
        assert sorted(self.runner.graphs) == [4, 16] * self.captured

    @invariant()
    def nobody_is_left_inside_of_a_capture(self) -> None:
        assert float(torch.ones(2).sum()) == 2  # a host read: refused inside of one

    # Helpers

    def batch(
        self, wanted: list[tuple[int, int]]
    ) -> tuple[PrefillBatch, list[tuple[Request, list[int]]]]:
        """Return a batch for the runner under test, and each request's new tokens in order."""
        tokens = []
        for which, count in wanted:
            if len(self.requests[which].tokens) + count > MOST_CACHED:
                self.end_a_request(which)
            drawn = torch.randint(0, 61, (count,), generator=self.random).tolist()
            tokens.append((self.requests[which], drawn))
        chunks = [Chunk(token_ids=drawn, sequence=request.own) for request, drawn in tokens]
        return PrefillBatch.from_chunks(chunks, self.runner.kv_cache), tokens

    def assert_right(self, result: PrefillResult, tokens: list[tuple[Request, list[int]]]) -> None:
        """Compare with one eager prefill a request on the plain runner, and remember the tokens."""
        parts = result.hidden_RD.split([len(drawn) for _, drawn in tokens])
        for (request, drawn), hidden_RD, logits_V in zip(
            tokens, parts, result.logits_BV, strict=True
        ):
            chunk = Chunk(token_ids=drawn, sequence=request.plain)
            batch = PrefillBatch.from_chunks([chunk], self.plain.kv_cache)
            expected = self.plain.prefill(batch, mode=Mode.EAGER)
            torch.testing.assert_close(hidden_RD, expected.hidden_RD)
            torch.testing.assert_close(logits_V, expected.logits_BV[0])
            request.tokens += drawn

    def count(self, mode: Mode, tokens: int) -> None:
        """Expect one more of what should have served ``tokens`` in ``mode``."""
        if mode is not Mode.BREAKABLE:
            self.expected["requested"][mode.value] += 1
        elif not tokens:
            self.expected["fallbacks"]["no requests"] += 1
        elif not self.captured:
            self.expected["fallbacks"]["no bucket is captured"] += 1
        elif tokens > 16:
            self.expected["fallbacks"]["more tokens than the largest bucket (16)"] += 1
        else:
            self.expected["replays"][4 if tokens <= 4 else 16] += 1

    def fail(self, wanted: list[tuple[int, int]], **options: Any) -> None:
        """Prefill, and expect the mistake to come through."""
        batch, _ = self.batch(wanted)
        with pytest.raises(MistakeError):
            self.runner.prefill(batch, **options)


@pytest.fixture
def run_machine(
    toy_model: type[Any], toy_backend: type[Any], make_backend: Make
) -> Callable[..., None]:
    """Return a function that runs the machine, with some things replaced."""

    def run(examples: int, *, phases: Collection[Phase] = tuple(Phase), **replaced: Any) -> None:
        parts = {
            "model_type": toy_model,
            "backend_type": toy_backend,
            "make_backend": staticmethod(make_backend),
        }
        machine = type("Machine", (RunnerMachine,), {**parts, **replaced})
        run_state_machine_as_test(
            machine,
            settings=settings(
                deadline=None,
                max_examples=examples,
                stateful_step_count=25,
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                phases=phases,
            ),
        )

    return run


def test_a_runner_stays_right_whatever_is_done_to_it(run_machine: Callable[..., None]) -> None:
    run_machine(examples=int(os.environ.get("BCG_STATE_MACHINE_EXAMPLES", "25")))


class KeepsCountsAfterFailures(PrefillRunner):
    """Count tokens as cached before it is certain that they are."""

    def prefill(self, batch: PrefillBatch, **options: Any) -> PrefillResult:
        for sequence, length in zip(batch.sequences, batch.kv_lens, strict=True):
            self.kv_cache.mark_written(sequence, length)
        return super().prefill(batch, **options)


class KeepsGraphsOfTheLastCapture(PrefillRunner):
    """Replay what was captured before the last release."""

    def release(self) -> None:
        graphs = self.graphs
        super().release()
        self.graphs = graphs


class SwitchesHalfway(PrefillRunner):
    """Forget which backend it had when another cannot be used."""

    def use_backend(self, backend: AttentionBackend | str, **options: Any) -> AttentionBackend:
        self._backend = None  # type: ignore[assignment]
        return super().use_backend(backend, **options)


class ForgetsToCount(PrefillRunner):
    """Replay without saying so."""

    def _count(self, mode: Mode, admission: Admission) -> None:
        if admission.bucket is None:
            super()._count(mode, admission)


@pytest.mark.parametrize(
    "faulty",
    [
        KeepsCountsAfterFailures,
        KeepsGraphsOfTheLastCapture,
        SwitchesHalfway,
        ForgetsToCount,
    ],
)
def test_the_machine_finds_a_faulty_runner(
    run_machine: Callable[..., None], faulty: type[PrefillRunner]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_machine(examples=50, phases=[Phase.generate], runner_type=faulty)
