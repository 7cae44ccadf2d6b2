"""Inject one fault after the other into a runner that serves, and say what happens and how the next batch fares.

``python tests/core/recovery_rows.py > docs/recovery.md`` runs all of it and writes the table; ``test_recovery.py``
holds the page to it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bcg_backends.sdpa import SDPABackend
from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Chunk,
    CPUSegmentEngine,
    ForwardContext,
    KVSequence,
    Mode,
    PagedKVCache,
    Phase,
    PrefillBatch,
    PrefillResult,
    PrefillRunner,
)
from bcg_llama import PRESETS, LlamaModel, random_llama

CONFIG = replace(
    PRESETS["tiny"], num_layers=2, vocab_size=64, hidden_size=64, intermediate_size=64, head_dim=16
)


class MistakeError(Exception):
    """What a row raises on purpose."""


class Bench:
    """Hold a captured runner that has served one batch, and what rows need to spoil it.

    Attributes:
        model: two layers; rows may replace its methods.
        runner: over buckets of 4 and 8, with a cache of 16 pages of 4 tokens.
        alice: a request with 6 cached tokens.
    """

    def __init__(self, *, captured: bool = True, threads: str = "wait") -> None:
        self.model: LlamaModel = random_llama(CONFIG, dtype=torch.float32, device="cpu")
        self.cache = PagedKVCache(self.model.spec, num_pages=17, page_size=4)
        self.runner = PrefillRunner(
            self.model, self.cache, "sdpa", buckets=[4, 8], max_requests=4, threads=threads
        )
        if captured:
            self.runner.capture()
        self.alice = KVSequence()
        self.prefill(self.batch(6, self.alice))

    @property
    def backend(self) -> Any:
        """Return the backend in use, to give attributes to."""
        return self.runner.backend

    def batch(self, tokens: int = 3, sequence: KVSequence | None = None) -> PrefillBatch:
        """Return a batch of one request."""
        chunk = Chunk(token_ids=range(1, 1 + tokens), sequence=sequence or KVSequence())
        return PrefillBatch.from_chunks([chunk], self.cache)

    def prefill(self, batch: PrefillBatch | None = None, **options: Any) -> PrefillResult:
        """Prefill ``batch``, or three tokens of a new request."""
        return self.runner.prefill(self.batch() if batch is None else batch, **options)

    def next_batch(self) -> str:
        """Go on with alice by two tokens, and say how that went: compared with one pass of a runner without a past."""
        told = self.batch(2, self.alice)
        result = self.prefill(told)
        fresh = PrefillRunner(self.model, PagedKVCache(self.model.spec, num_pages=9), "sdpa")
        tokens = [1, 2, 3, 4, 5, 6, 1, 2]
        once = PrefillBatch.from_chunks(
            [Chunk(token_ids=tokens, sequence=KVSequence())], fresh.kv_cache
        )
        expected = fresh.prefill(once, mode=Mode.EAGER).logits_BV
        error = float((result.logits_BV - expected).norm() / expected.norm())
        served = result.admission.bucket
        how = f"replays bucket {served}" if served else f"eager: {result.admission.reason}"
        return f"right, {how}" if error < 1e-4 else f"WRONG by {error:.1g}, {how}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Inject one fault.

    Attributes:
        fault: what goes wrong, for the table.
        inject: does it to a bench; what it raises is what happens.
        bench: makes the bench.
    """

    fault: str
    inject: Callable[[Bench], object]
    bench: Callable[[], Bench] = Bench


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises ``kind``."""

    def fail(*args: object, **kwargs: object) -> Any:
        raise kind

    return fail


@contextmanager
def having(target: Any, **attributes: Any) -> Iterator[None]:
    """Give ``target`` attributes of its own while the block runs."""
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(target, name)


def hook(name: str, do: Callable[..., Any], **options: Any) -> Callable[[Bench], None]:
    """Return an injection that prefills while the backend's method ``name`` is ``do``."""

    def inject(bench: Bench) -> None:
        batch = bench.batch()
        with having(bench.backend, **{name: do}):
            bench.prefill(batch, **options)

    return inject


def calling(name: str, do: Callable[[Bench], object]) -> Callable[[Bench], None]:
    """Return an injection in which the backend's method ``name`` calls ``do`` with the bench."""
    return lambda bench: hook(name, lambda *args, **kwargs: do(bench))(bench)


def in_layer(layer: int, do: Callable[..., Any]) -> Callable[[Bench], None]:
    """Return an injection in which ``forward`` of one layer is ``do``."""

    def inject(bench: Bench) -> None:
        forward = bench.backend.forward

        def there(*args: Any) -> Any:
            return do(*args) if args[4] == layer else forward(*args)

        hook("forward", there)(bench)

    return inject


def capturing(**methods: Any) -> Callable[[Bench], None]:
    """Return an injection that captures anew while the backend has ``methods``."""

    def inject(bench: Bench) -> None:
        bench.runner.release()
        with having(bench.backend, **methods):
            bench.runner.capture()

    return inject


def model_at(phase: Phase, do: Callable[..., Any]) -> Callable[[Bench], None]:
    """Return an injection in which the model does ``do`` in forwards of ``phase``."""

    def inject(bench: Bench) -> None:
        forward = bench.model.forward

        def there(ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
            if ctx.phase is phase:
                do(ids_T)
            return forward(ids_T, positions_T, ctx)

        with having(bench.model, forward=there):
            if phase is Phase.EAGER:
                bench.prefill(mode=Mode.EAGER)
            else:
                bench.runner.release()
                bench.runner.capture()

    return inject


def out_of_memory_at(phase: Phase) -> Callable[[Bench], None]:
    """Return an injection in which bucket 8 finds no memory in ``phase``."""

    def fail(ids_T: Tensor) -> None:
        if len(ids_T) == 8:
            raise torch.OutOfMemoryError("out of memory, as the row wants it")

    return model_at(phase, fail)


def of_another_cache(bench: Bench) -> None:
    other = PagedKVCache(bench.model.spec, num_pages=9, page_size=4)
    chunk = Chunk(token_ids=[1], sequence=KVSequence())
    bench.prefill(PrefillBatch.from_chunks([chunk], other))


def sequence_of_another_cache(bench: Bench) -> None:
    other = PagedKVCache(bench.model.spec, num_pages=9, page_size=4)
    sequence = KVSequence()
    other.extend(sequence, 4)
    bench.batch(1, sequence)


def stale_batch(bench: Bench) -> None:
    batch = bench.batch(2, bench.alice)
    bench.alice.cached = 3
    try:
        bench.prefill(batch)
    finally:
        bench.alice.cached = 6


def raised_count(bench: Bench) -> None:
    bench.alice.cached = 40


def foreign_pages(bench: Bench) -> None:
    PrefillBatch.build(
        input_ids=[1],
        new_lens=[1],
        prefix_lens=[4],
        page_table=[list(bench.alice.pages)],
        kv_cache=bench.cache,
    )


def twice(bench: Bench) -> None:
    chunk = Chunk(token_ids=[1], sequence=bench.alice)
    PrefillBatch.from_chunks([chunk, chunk], bench.cache)


def too_many_requests(bench: Bench) -> None:
    chunks = [Chunk(token_ids=[1], sequence=KVSequence()) for _ in range(5)]
    bench.prefill(PrefillBatch.from_chunks(chunks, bench.cache))


def token_outside(bench: Bench) -> None:
    chunk = Chunk(token_ids=[64], sequence=KVSequence())
    bench.prefill(PrefillBatch.from_chunks([chunk], bench.cache))


def more_than_cached(bench: Bench) -> None:
    chunk = Chunk(token_ids=[1], sequence=bench.alice, prefix_len=7)
    PrefillBatch.from_chunks([chunk], bench.cache)


def free_of_nobodys_fork(bench: Bench) -> None:
    """Free what a fork shares: the fork reads on."""
    fork = bench.cache.fork(bench.alice)
    bench.cache.free(bench.alice)
    bench.alice = fork


def write_behind_a_fork(bench: Bench) -> None:
    """Go on behind a fork's half page: its parent keeps its own."""
    fork = bench.cache.fork(bench.alice, 5)
    bench.prefill(bench.batch(3, fork))


def in_a_bare_capture(bench: Bench) -> None:
    batch = bench.batch()
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(CPUSegmentEngine())):
        bench.prefill(batch)


def unreplayable(bench: Bench) -> None:
    BreakableCUDAGraph(CPUSegmentEngine()).replay()


def counted(bench: Bench) -> None:
    batch = bench.batch()
    with FlopCounterMode(display=False):
        bench.prefill(batch)


def counted_capture(bench: Bench) -> None:
    bench.runner.release()
    with FlopCounterMode(display=False):
        bench.runner.capture()


def autocast(bench: Bench) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bench.prefill()


def autocast_capture(bench: Bench) -> None:
    bench.runner.release()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bench.runner.capture()


def default_device(bench: Bench) -> None:
    with torch.device("meta"):
        bench.prefill()


def from_a_thread(bench: Bench) -> None:
    """Call from another thread while this one is inside."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            bench.prefill()
        except BaseException as error:  # noqa: BLE001  # passed on below
            raised.append(error)

    def sample(logits_BV: Tensor) -> Tensor:
        thread = threading.Thread(target=call, name="another")
        thread.start()
        thread.join()
        return logits_BV.argmax(-1)

    bench.prefill(sample=sample)
    if raised:
        raise raised[0]


def poisoned_request(bench: Bench) -> None:
    """Let a request leave NaN in its pages, and free it."""
    row, sequence = bench.model.weights.embedding_VD[63].clone(), KVSequence()
    bench.model.weights.embedding_VD[63] = torch.nan
    chunk = Chunk(token_ids=[63] * 30, sequence=sequence)
    bench.prefill(PrefillBatch.from_chunks([chunk], bench.cache))
    bench.cache.free(sequence)
    bench.model.weights.embedding_VD[63] = row


FAIL = raising(MistakeError)

ROWS: dict[str, Row] = {
    "eager-metadata": Row(
        fault="`init_forward_metadata` raises, eagerly",
        inject=hook("init_forward_metadata", FAIL, mode=Mode.EAGER),
    ),
    "replay-metadata": Row(
        fault="`init_forward_metadata` raises ahead of a replay",
        inject=hook("init_forward_metadata", FAIL),
    ),
    "bucket-metadata": Row(
        fault="`update_bucket_metadata` raises", inject=hook("update_bucket_metadata", FAIL)
    ),
    "first-layer": Row(fault="`forward` raises in the first layer", inject=in_layer(0, FAIL)),
    "last-layer": Row(fault="`forward` raises in the last layer", inject=in_layer(1, FAIL)),
    "eager-forward": Row(
        fault="`forward` raises, eagerly", inject=hook("forward", FAIL, mode=Mode.EAGER)
    ),
    "padded-eager-forward": Row(
        fault="`forward` raises, eagerly in a bucket's shape",
        inject=hook("forward", FAIL, mode=Mode.PADDED_EAGER),
    ),
    "interrupted-forward": Row(
        fault="Ctrl-C in `forward`", inject=in_layer(1, raising(KeyboardInterrupt))
    ),
    "wrong-shape": Row(
        fault="`forward` returns another shape",
        inject=hook("forward", lambda q, *rest: torch.zeros(1, 1, 1)),
    ),
    "wrong-type": Row(
        fault="`forward` returns another type",
        inject=hook("forward", lambda q, *rest: q.double()),
    ),
    "no-tensor": Row(fault="`forward` returns nothing", inject=hook("forward", lambda *args: None)),
    "nan-output": Row(
        fault="`forward` returns NaN",
        inject=hook("forward", lambda q, *rest: torch.full_like(q, torch.nan)),
    ),
    "prefill-in-forward": Row(
        fault="`forward` calls `prefill`",
        inject=calling("forward", lambda bench: bench.prefill()),
    ),
    "capture-in-forward": Row(
        fault="`forward` calls `capture`",
        inject=calling("forward", lambda bench: bench.runner.capture()),
    ),
    "release-in-metadata": Row(
        fault="`update_bucket_metadata` calls `release`",
        inject=calling("update_bucket_metadata", lambda bench: bench.runner.release()),
    ),
    "switch-in-forward": Row(
        fault="`forward` calls `use_backend`",
        inject=calling("forward", lambda bench: bench.runner.use_backend("sdpa")),
    ),
    "sample": Row(fault="`sample` raises", inject=lambda bench: bench.prefill(sample=FAIL)),
    "prefill-in-sample": Row(
        fault="`sample` calls `prefill`",
        inject=lambda bench: bench.prefill(sample=lambda logits: bench.prefill().logits_BV),
    ),
    "free-in-sample": Row(
        fault="`sample` frees the sequence of its own batch",
        inject=lambda bench: free_in_sample(bench),
    ),
    "logits": Row(fault="`compute_logits` raises", inject=lambda bench: logits(bench)),
    "model": Row(fault="the model raises, eagerly", inject=model_at(Phase.EAGER, FAIL)),
    "model-warm-up": Row(
        fault="the model raises in a warm-up", inject=model_at(Phase.WARM_UP, FAIL)
    ),
    "model-capture": Row(
        fault="the model raises in a capture", inject=model_at(Phase.CAPTURE, FAIL)
    ),
    "model-reads": Row(
        fault="the model reads a value on the host in a segment",
        inject=model_at(Phase.CAPTURE, lambda ids_T: ids_T.sum().item()),
    ),
    "interrupted-capture": Row(
        fault="Ctrl-C in a capture", inject=model_at(Phase.CAPTURE, raising(KeyboardInterrupt))
    ),
    "progress": Row(fault="`progress` raises", inject=lambda bench: captured_again(bench, FAIL)),
    "memory-warm-up": Row(
        fault="a bucket finds no memory in its warm-up", inject=out_of_memory_at(Phase.WARM_UP)
    ),
    "memory-capture": Row(
        fault="a bucket finds no memory in its capture", inject=out_of_memory_at(Phase.CAPTURE)
    ),
    "backend-warm-up": Row(
        fault="the backend's `warm_up` raises in a capture", inject=capturing(warm_up=FAIL)
    ),
    "backend-bucket": Row(
        fault="the backend's `init_bucket_metadata` raises",
        inject=capturing(init_bucket_metadata=FAIL),
    ),
    "backend-warm-up-shape": Row(
        fault="`forward` returns another shape in the warm-up of a capture",
        inject=capturing(forward=lambda q, *rest: torch.zeros(1, 1, 1)),
    ),
    "captured-twice": Row(
        fault="`capture` is called twice", inject=lambda bench: bench.runner.capture()
    ),
    "unknown-backend": Row(
        fault="`use_backend` names none that is registered",
        inject=lambda bench: bench.runner.use_backend("nobody"),
    ),
    "unknown-option": Row(
        fault="`use_backend` gives an option that does not exist",
        inject=lambda bench: bench.runner.use_backend("sdpa", speed=11),
    ),
    "new-backend-warm-up": Row(
        fault="the backend that `use_backend` is given fails in its warm-up",
        inject=lambda bench: failing_backend(bench),
    ),
    "token-outside": Row(fault="a token outside of the vocabulary", inject=token_outside),
    "too-many-requests": Row(fault="more requests than `max_requests`", inject=too_many_requests),
    "too-long": Row(fault="more tokens than there are pages", inject=lambda bench: bench.batch(90)),
    "another-cache": Row(fault="a batch for another cache", inject=of_another_cache),
    "sequence-of-another-cache": Row(
        fault="a sequence of another cache", inject=sequence_of_another_cache
    ),
    "stale-batch": Row(
        fault="a sequence that is rewound between batch and prefill", inject=stale_batch
    ),
    "twice": Row(fault="a sequence twice in a batch", inject=twice),
    "more-than-cached": Row(fault="a prefix longer than what is cached", inject=more_than_cached),
    "raised-count": Row(fault="`cached` raised beyond what is written", inject=raised_count),
    "claimed-pages": Row(
        fault="a sequence made of somebody's pages",
        inject=lambda bench: KVSequence(pages=list(bench.alice.pages), cached=6),
    ),
    "foreign-pages": Row(fault="a page table that writes a sequence's pages", inject=foreign_pages),
    "freed-parent": Row(
        fault="a sequence is freed that a fork shares pages with", inject=free_of_nobodys_fork
    ),
    "written-fork": Row(
        fault="a fork goes on in a page that its parent reads", inject=write_behind_a_fork
    ),
    "poisoned-request": Row(
        fault="a request leaves NaN in the pages it gives back", inject=poisoned_request
    ),
    "bare-capture": Row(fault="`prefill` inside of a capture", inject=in_a_bare_capture),
    "unreplayable": Row(fault="a replay before any capture", inject=unreplayable),
    "flop-counter": Row(fault="`prefill` under `FlopCounterMode`", inject=counted),
    "flop-counter-capture": Row(fault="`capture` under `FlopCounterMode`", inject=counted_capture),
    "autocast": Row(fault="`prefill` under `torch.autocast`", inject=autocast),
    "autocast-capture": Row(fault="`capture` under `torch.autocast`", inject=autocast_capture),
    "default-device": Row(fault="`prefill` under another default device", inject=default_device),
    "second-thread": Row(
        fault='a second thread, with `threads="refuse"`',
        inject=from_a_thread,
        bench=lambda: Bench(threads="refuse"),
    ),
}


def free_in_sample(bench: Bench) -> None:
    sequence = KVSequence()

    def sample(logits_BV: Tensor) -> Tensor:
        bench.cache.free(sequence)
        return logits_BV.argmax(-1)

    bench.prefill(bench.batch(3, sequence), sample=sample)


def logits(bench: Bench) -> None:
    with having(bench.model, compute_logits=FAIL):
        bench.prefill()


def captured_again(bench: Bench, progress: Callable[[int, int], None]) -> None:
    bench.runner.release()
    bench.runner.capture(progress)


def failing_backend(bench: Bench) -> None:
    backend: Any = SDPABackend(bench.backend.spec, bench.runner.limits, bench.cache.device)
    backend.warm_up = FAIL
    bench.runner.use_backend(backend)


def observe(row: Row) -> tuple[str, str]:
    """Run a row; return what happened and how the next batch fared."""
    bench = row.bench()
    try:
        row.inject(bench)
    except BaseException as error:  # noqa: BLE001  # that is the question
        notes = getattr(error, "__notes__", ())
        said = f": {_first_sentence(str(error))}" if str(error) else ""
        happened = f"`{type(error).__name__}`{said}" + "".join(f"; {note}" for note in notes)
    else:
        happened = "nothing that is seen"
    return happened, bench.next_batch()


def _first_sentence(message: str) -> str:
    line = " ".join(message.split()).replace("|", "/")
    return line.split(": ", 1)[0] if len(line) > 160 and ": " in line else line[:160]


HEADER = """# What happens when something fails

A runner that has captured two buckets and holds a request of six tokens is given one fault after the other. What is
raised reaches the caller as it was raised, with notes of the place. Afterwards the same runner goes on with that
request by two tokens, and the result is compared with one pass of a runner without a past. Made by
`python tests/core/recovery_rows.py > docs/recovery.md`; `tests/core/test_recovery.py` runs every row.

| fault | what happens | next batch |
| --- | --- | --- |
"""


def line_of(row: Row) -> str:
    """Run a row, and return its line of the table."""
    happened, after = observe(row)
    return f"| {row.fault} | {happened} | {after} |"


def main() -> None:
    """Print the page."""
    print(HEADER + "\n".join(line_of(row) for row in ROWS.values()))


if __name__ == "__main__":
    main()
