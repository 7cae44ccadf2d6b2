"""One call of a runner at a time: calls from inside of one, threads, interrupts, streams."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    Admission,
    KVSequence,
    Mode,
    NestedCaptureError,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    RunnerBusyError,
    greedy,
)

Make = Callable[..., Any]
MODES = pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
SECONDS = 20
"""How long a test waits for another thread before it fails."""

CALLS: dict[str, Callable[[PrefillRunner, PrefillBatch], Any]] = {
    "prefill": lambda runner, batch: runner.prefill(batch),
    "capture": lambda runner, batch: runner.capture(),
    "release": lambda runner, batch: runner.release(),
    "use_backend": lambda runner, batch: runner.use_backend(runner.backend),
}
EACH_CALL = pytest.mark.parametrize("call", CALLS)


def still_works(runner: PrefillRunner, make_batch: Make) -> None:
    """Check that the runner replays as padded eager does."""
    batch = make_batch(3, 4)
    replayed = runner.prefill(batch)
    assert replayed.admission == Admission.replay(8)
    logits_BV = replayed.logits_BV
    assert torch.equal(logits_BV, runner.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)


def refused(inner: str, outer: str) -> Any:
    """Expect the refusal of ``inner`` inside ``outer``."""
    return pytest.raises(
        RunnerBusyError,
        match=f"^{inner} was called inside {outer} of the same runner, whose memory is in use .*use another runner",
    )


# From inside of a call


@MODES
@EACH_CALL
def test_a_call_in_the_forward_of_a_backend_is_refused_with_both_names(
    make_runner: Make, make_batch: Make, call: str, mode: Mode
) -> None:
    runner, other = make_runner(), make_batch(2)
    runner.backend.before_forward = lambda layer: CALLS[call](runner, other)
    with refused(call, "prefill"):
        runner.prefill(make_batch(3, 4), mode=mode)
    runner.backend.before_forward = lambda layer: None
    still_works(runner, make_batch)


@EACH_CALL
def test_a_call_while_a_backend_prepares_a_batch_is_refused(
    make_runner: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    runner, other = make_runner(), make_batch(2)
    with monkeypatch.context() as patch:
        patch.setattr(
            runner.backend, "init_forward_metadata", lambda batch: CALLS[call](runner, other)
        )
        with refused(call, "prefill"):
            runner.prefill(make_batch(3, 4))
    still_works(runner, make_batch)


@pytest.mark.parametrize("hook", ["warm_up", "init_bucket_metadata"])
@EACH_CALL
def test_a_call_while_a_backend_warms_up_is_refused(
    make_runner: Make, make_backend: Make, make_batch: Make, call: str, hook: str
) -> None:
    runner, other, batch = make_runner(), make_backend(), make_batch(2)
    setattr(other, hook, lambda *arguments: CALLS[call](runner, batch))
    with refused(call, "use_backend"):
        runner.use_backend(other)
    assert runner.backend is not other
    still_works(runner, make_batch)


@EACH_CALL
def test_a_call_in_a_sampler_is_refused(make_runner: Make, make_batch: Make, call: str) -> None:
    runner, other = make_runner(), make_batch(2)

    def sample(logits_BV: Tensor) -> Tensor:
        CALLS[call](runner, other)
        return greedy(logits_BV)

    with refused(call, "prefill"):
        runner.prefill(make_batch(3, 4), sample=sample)
    still_works(runner, make_batch)


@EACH_CALL
def test_a_call_in_a_progress_callback_is_refused(
    make_runner: Make, make_batch: Make, call: str
) -> None:
    runner, batch = make_runner(captured=False), make_batch(2)
    with refused(call, "capture"):
        runner.capture(progress=lambda done, total: CALLS[call](runner, batch))
    assert runner.graphs == {}
    runner.capture()
    still_works(runner, make_batch)


@EACH_CALL
def test_a_call_in_a_model_is_refused_at_capture(
    make_runner: Make, make_batch: Make, toy_model: type[Any], call: str
) -> None:
    class Calling(toy_model):
        armed = True

        def forward(self, *arguments: Any) -> Tensor:
            if self.armed:
                CALLS[call](runner, batch)
            return super().forward(*arguments)

    runner, batch = make_runner(model=Calling(), captured=False), make_batch(2)
    with refused(call, "capture"):
        runner.capture()
    runner.model.armed = False
    runner.capture()
    still_works(runner, make_batch)


def test_a_backend_that_swallows_the_refusal_spoils_nothing(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch, other = make_runner(), make_batch(3, 4), make_batch(5, seed=7)
    expected = runner.prefill(batch).logits_BV

    def call(layer: int) -> None:
        with refused("prefill", "prefill"):
            runner.prefill(other)

    runner.backend.before_forward = call
    assert torch.equal(runner.prefill(batch).logits_BV, expected)
    assert other.sequences[0].cached == 0


def test_an_option_may_have_any_name(make_runner: Make) -> None:
    with pytest.raises(TypeError, match="name"):  # from the backend, not from what takes turns
        make_runner().use_backend("sdpa", name=1, method=2)


# Another runner


@pytest.fixture
def other_runner(make_runner: Make, toy_model: Make) -> PrefillRunner:
    """Return a captured runner with a KV cache of its own."""
    runner: PrefillRunner = make_runner(
        kv_cache=PagedKVCache(toy_model().spec, num_pages=32, page_size=4)
    )
    return runner


@MODES
def test_another_runner_may_prefill_in_a_break(
    make_runner: Make, make_batch: Make, make_chunk: Make, other_runner: PrefillRunner, mode: Mode
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    inner = PrefillBatch.from_chunks([make_chunk(6, seed=3)], other_runner.kv_cache)
    expected = [runner.prefill(batch).logits_BV, other_runner.prefill(inner).logits_BV]
    found: list[Tensor] = []
    runner.backend.before_forward = lambda layer: found.append(
        other_runner.prefill(inner).logits_BV
    )
    assert torch.equal(runner.prefill(batch).logits_BV, expected[0])
    assert all(torch.equal(logits_BV, expected[1]) for logits_BV in found)
    runner.prefill(batch, mode=mode)
    assert len(found) == 4


@EACH_CALL
def test_another_runner_is_refused_at_capture(
    make_runner: Make,
    make_chunk: Make,
    toy_model: type[Any],
    other_runner: PrefillRunner,
    call: str,
) -> None:
    class Calling(toy_model):
        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            if ctx.phase.value == "capture":
                CALLS[call](other_runner, batch)
            return super().forward(input_ids_T, positions_T, ctx)

    batch = PrefillBatch.from_chunks([make_chunk(2)], other_runner.kv_cache)
    runner = make_runner(model=Calling(), captured=False)
    with pytest.raises(NestedCaptureError, match=f"{call} cannot be called inside a capture"):
        runner.capture()


# Threads


class Holding:
    """Hold a turn of ``runner`` in another thread, inside of a sampler, until told to go on."""

    def __init__(self, runner: PrefillRunner, batch: PrefillBatch) -> None:
        self._runner, self._batch = runner, batch
        self._inside, self._go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def _sample(self, logits_BV: Tensor) -> Tensor:
        self._inside.set()
        assert self._go_on.wait(SECONDS)
        return greedy(logits_BV)

    def _hold(self) -> None:
        self._runner.prefill(self._batch, sample=self._sample)

    @contextmanager
    def __call__(self) -> Iterator[Callable[[], None]]:
        """Hold it inside of the ``with`` block, which is given what ends it."""
        thread = threading.Thread(target=self._hold, name="holder")
        thread.start()
        try:
            assert self._inside.wait(SECONDS)
            yield self._go_on.set
        finally:
            self._go_on.set()
            thread.join(SECONDS)
        assert not thread.is_alive()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make each call in a thread of its own, all at once, and return what they return."""
    results: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(number: int, call: Callable[[], Any]) -> None:
        start.wait(SECONDS)
        results[number] = call()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return results


@MODES
def test_two_threads_over_one_runner_get_right_results(
    make_runner: Make, make_batch: Make, mode: Mode
) -> None:
    runner = make_runner()
    batches = [[make_batch(2 + n % 3, seed=10 * n + t) for n in range(12)] for t in range(2)]

    def prefill(each: list[PrefillBatch]) -> list[Tensor]:
        return [runner.prefill(batch, mode=mode).logits_BV for batch in each]

    expected = [prefill(each) for each in batches]
    runner.backend.before_forward = lambda layer: sleep(0.0005)  # lets the other thread run
    found = together(*(partial(prefill, each) for each in batches))
    for logits, wanted in zip(found, expected, strict=True):
        assert [torch.equal(*pair) for pair in zip(logits, wanted, strict=True)] == [True] * 12


class TakesNoTurns(PrefillRunner):
    """Let anybody in at any time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        turns: Any = self._turns
        turns.run = lambda name, method, *rest, **more: method(*rest, **more)


@pytest.fixture
def without_turns(kv_cache: PagedKVCache, toy_model: Make, make_backend: Make) -> PrefillRunner:
    """Return a captured runner that lets anybody in."""
    runner = TakesNoTurns(toy_model(), kv_cache, make_backend(), buckets=[8, 16])
    runner.capture()
    return runner


def test_without_turns_a_call_inside_of_another_spoils_it(
    without_turns: PrefillRunner, make_batch: Make
) -> None:
    batch, other = make_batch(3, 4), make_batch(5, seed=7)
    expected = without_turns.prefill(batch).logits_BV
    backend: Any = without_turns.backend

    def call(layer: int) -> None:
        backend.before_forward = lambda layer: None
        without_turns.prefill(other, mode=Mode.EAGER)

    backend.before_forward = call
    assert not torch.equal(without_turns.prefill(batch).logits_BV, expected)


def test_without_turns_another_thread_spoils_a_call(
    without_turns: PrefillRunner, make_batch: Make
) -> None:
    batch, other = make_batch(3, 4), make_batch(5, seed=7)
    expected = without_turns.prefill(batch).logits_BV
    backend: Any = without_turns.backend

    def let_another_in(layer: int) -> None:
        backend.before_forward = lambda layer: None
        together(lambda: without_turns.prefill(other, mode=Mode.EAGER))

    backend.before_forward = let_another_in
    assert not torch.equal(without_turns.prefill(batch).logits_BV, expected)


def test_a_capture_waits_for_the_prefill_of_another_thread(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner(captured=False)
    order: list[str] = []

    def capture() -> None:
        runner.capture(progress=lambda done, total: order.append("capture"))

    with Holding(runner, make_batch(3))() as go_on:
        waiting = threading.Thread(target=capture)
        waiting.start()
        waiting.join(0.05)
        order.append("prefill")
        go_on()
        waiting.join(SECONDS)
    assert order == ["prefill"] + ["capture"] * 4
    still_works(runner, make_batch)


@EACH_CALL
def test_a_runner_may_refuse_other_threads(make_runner: Make, make_batch: Make, call: str) -> None:
    runner, batch = make_runner(threads="refuse"), make_batch(2)
    with (
        Holding(runner, make_batch(3))(),
        pytest.raises(
            RunnerBusyError,
            match=rf"^{call} was called in thread 'MainThread' during prefill of the same runner in thread 'holder', "
            r".*make the runner with threads='wait'",
        ),
    ):
        CALLS[call](runner, batch)
    still_works(runner, make_batch)


def test_a_runner_that_refuses_other_threads_lets_them_in_one_after_the_other(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch = make_runner(threads="refuse"), make_batch(3)
    expected = runner.prefill(batch).logits_BV
    (result,) = together(lambda: runner.prefill(batch))
    assert torch.equal(result.logits_BV, expected)


def test_a_thread_inside_of_a_capture_does_not_wait(
    make_runner: Make, make_batch: Make, capture: Make
) -> None:
    # What holds the turn may itself wait until that capture is over.
    runner, batch = make_runner(), make_batch(2)
    with (
        Holding(runner, make_batch(3))(),
        pytest.raises(NestedCaptureError, match="prefill cannot be called inside a capture"),
    ):
        capture(lambda: runner.prefill(batch))


def test_there_is_no_third_way_with_threads(make_runner: Make) -> None:
    with pytest.raises(ValueError, match=r"threads is 'hope': use 'wait', .* or 'refuse'"):
        make_runner(threads="hope", captured=False)


# Interrupts


def test_an_interrupt_while_waiting_leaves_the_turn_free(
    make_runner: Make, make_batch: Make, request: pytest.FixtureRequest
) -> None:
    runner = make_runner()
    press = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    # A process that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    with Holding(runner, make_batch(3))() as go_on:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # nothing else may be interrupted
            threading.Timer(0.1, press).start()
            runner.prefill(make_batch(3))
        go_on()
    still_works(runner, make_batch)
    (result,) = together(lambda: runner.prefill(make_batch(2)))
    assert result.admission == Admission.replay(8)


@pytest.mark.parametrize("threads", ["wait", "refuse"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_inside_leaves_the_turn_free(
    make_runner: Make, make_batch: Make, threads: str, error: type[BaseException]
) -> None:
    runner = make_runner(threads=threads)

    def sample(logits_BV: Tensor) -> Tensor:
        raise error

    with pytest.raises(error):
        runner.prefill(make_batch(3), sample=sample)
    still_works(runner, make_batch)
    (result,) = together(lambda: runner.prefill(make_batch(2)))
    assert result.admission == Admission.replay(8)


def test_an_interrupt_at_the_very_beginning_of_a_turn_leaves_it_free(
    make_runner: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    runner = make_runner()
    with monkeypatch.context() as patch:
        patch.setattr(runner._turns, "_before", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.prefill(make_batch(3))
    still_works(runner, make_batch)


# Results


def test_hidden_states_are_overwritten_by_the_next_call_and_logits_are_not(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    first = runner.prefill(make_batch(3))
    hidden_RD, logits_BV = first.hidden_RD.clone(), first.logits_BV.clone()
    (second,) = together(lambda: runner.prefill(make_batch(3, seed=5)))
    assert first.hidden_RD.data_ptr() == second.hidden_RD.data_ptr()
    assert not torch.equal(first.hidden_RD, hidden_RD)
    assert torch.equal(first.logits_BV, logits_BV)


def test_a_turn_is_taken_before_the_batch_is_checked(make_runner: Make, make_batch: Make) -> None:
    # Checks read sequences, which the call that runs may be about to change.
    runner, stale = make_runner(), make_batch(3)
    runner.kv_cache.free(stale.sequences[0])
    runner.kv_cache.extend(KVSequence(), 3)
    runner.backend.before_forward = lambda layer: runner.prefill(stale)
    with refused("prefill", "prefill"):
        runner.prefill(make_batch(2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_two_streams_over_one_runner_get_right_results(toy_model: Make, make_chunk: Make) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = toy_model(device=device)
    cache = PagedKVCache(model.spec, num_pages=64, page_size=16)
    runner = PrefillRunner(model, cache, "sdpa", buckets=[8, 16])
    runner.capture()
    chunks = [make_chunk(length, seed=seed) for seed, length in enumerate([5, 9] * 6)]
    batches = [PrefillBatch.from_chunks([chunk], cache) for chunk in chunks]
    expected = [runner.prefill(batch).logits_BV for batch in batches]
    torch.cuda.synchronize()
    backend: Any = runner.backend
    forward = backend.forward

    def late(*arguments: Any) -> Any:
        torch.cuda._sleep(
            1_000_000
        )  # long enough for the other stream to get in between two segments
        return forward(*arguments)

    backend.forward = late
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for number, batch in enumerate(batches):
        with torch.cuda.stream(streams[number % 2]):
            results.append(runner.prefill(batch).logits_BV)
    torch.cuda.synchronize()
    assert [torch.equal(*pair) for pair in zip(results, expected, strict=True)] == [True] * 12
