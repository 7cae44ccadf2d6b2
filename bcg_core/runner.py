"""Capture a model's prefill in segments, and serve batches by replay.

Shape letters: T bucket (padded) tokens, R real tokens, B requests, D model dim, V vocabulary.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bcg_core.ambient import neutral, neutrally
from bcg_core.backend import AttentionBackend, Metadata
from bcg_core.batch import PrefillBatch
from bcg_core.buckets import Admission, TokenBuckets
from bcg_core.context import ForwardContext, Phase
from bcg_core.current_device import on_device
from bcg_core.engine import SegmentEngine, engine_for
from bcg_core.errors import BatchError, BucketError, CaptureError, UnsupportedSpecError
from bcg_core.garbage import no_garbage_collection
from bcg_core.graph import BreakableCUDAGraph, BreakableCUDAGraphCapture
from bcg_core.kept_backends import KeptBackends, recipe_of
from bcg_core.kv_cache import PagedKVCache
from bcg_core.model import PrefillModel
from bcg_core.notes import add_note, noting
from bcg_core.precision import check_matmul_precision, matmul_precision
from bcg_core.prefilling import Prefilling, clear_tails
from bcg_core.prepared import PreparedBackends
from bcg_core.registry import BackendRegistry
from bcg_core.results import (
    CapturedBucket,
    CaptureReport,
    Mode,
    PrefillResult,
    RunnerStats,
)
from bcg_core.runner_checks import (
    as_mode,
    check_batch,
    check_cache,
    check_engine,
)
from bcg_core.spec import AttentionSpec, BackendLimits
from bcg_core.stream_order import stream_order
from bcg_core.turns import Threads, Turns, in_turn
from bcg_core.workspace import StaticInputs, Workspace

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

_NO_BUCKET = Admission.eager("no bucket is captured")
_NO_REQUESTS = Admission.eager("no requests")
_ASKED_FOR = Admission.eager("asked for")


def greedy(logits_BV: Tensor) -> Tensor:
    """Choose the most likely token of each request; returns ``[B]`` int64."""
    return logits_BV.argmax(dim=-1)


class PrefillRunner:
    """Serve prefill batches of one model with one attention backend at a time.

    Attention is outside the segments, so ``use_backend`` switches backends between calls without a new capture.
    Everything runs on the KV cache's device, whichever device is current for the caller. ``full_graph`` is there for
    comparison.

    One call of ``prefill``, ``capture``, ``use_backend`` or ``release`` at a time. One from inside another, as in a
    backend, a model, a sampler or a progress callback, raises RunnerBusyError, and the runner works on; another runner
    may be called there, except at capture. Other threads wait for their turn. On a GPU their streams do, too: the work
    of a call runs behind that of the last one, whichever streams the two threads have. Hidden states are views that the
    next call overwrites, whoever makes it: threads that share a runner use logits and tokens, which are their own.

    Args:
        model: what to run; its weights are read at the addresses they have at capture.
        kv_cache: where keys and values go; holds the prefixes.
        backend: a backend, or the registered name of one, which is then made with ``backend_options``.
        buckets: token counts to capture; default is a ladder up to 2048 tokens or the KV cache's size.
        max_requests: most requests of a batch.
        engine: records the segments; default is the one for the KV cache's device.
        full_graph: capture one graph a bucket, attention included, for backends that support it; graphs then belong to
            the backend that was captured.
        threads: what becomes of a call during one of another thread: ``"wait"``, or ``"refuse"`` with RunnerBusyError.
            Refuse where calls might wait for each other: one waits for a thread that calls the runner, or two runners
            call one another.
        keep_backends: how many of the backends used last are kept ready, at least the one in use.

    Raises KVCacheError for a cache that does not fit the model, BucketError for buckets that make no ladder or fit into
    no memory, ValueError for less than one request or backend to keep, an engine of another device or another word for
    ``threads``, and what ``BackendRegistry.create`` raises for a backend.

    Attributes:
        context: what segments and breaks share.
        workspace: fixed-address memory of the forwards.
        graphs: captured graphs by bucket.
        stats: counts of replays, of eager prefills with their reasons, and of failures.
    """

    @neutrally("PrefillRunner")
    def __init__(
        self,
        model: PrefillModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend | str,
        *,
        backend_options: dict[str, Any] | None = None,
        buckets: Iterable[int] | None = None,
        max_requests: int = 256,
        engine: SegmentEngine | None = None,
        full_graph: bool = False,
        threads: Threads = "wait",
        keep_backends: int = 8,
    ) -> None:
        check_cache(kv_cache, model.spec)
        if max_requests < 1:
            raise ValueError(
                f"max_requests is {max_requests}, but a batch has at least one request"
            )
        slots = kv_cache.num_slots - kv_cache.page_size
        self.model = model
        self.kv_cache = kv_cache
        self.buckets = (
            TokenBuckets.ladder(min(2048, slots)) if buckets is None else TokenBuckets(buckets)
        )
        self.limits = BackendLimits(
            max_tokens=max(slots, self.buckets[-1]),
            max_requests=max_requests,
            max_context=min(model.spec.max_positions, slots),
            num_pages=kv_cache.num_pages,
        )
        self.engine = engine or engine_for(kv_cache.device)
        check_engine(self.engine, kv_cache)
        self.full_graph = full_graph
        self.context = ForwardContext(kv_cache)
        self.graphs: dict[int, BreakableCUDAGraph] = {}
        self.stats = RunnerStats()
        self._captured: TokenBuckets | None = None
        self._turns = Turns(threads, stream_order(kv_cache.device))
        self._prepared = PreparedBackends(self.limits, kv_cache)
        self._kept = KeptBackends(keep_backends)
        self._full_metadata: dict[int, Metadata] = {}
        self._held_bytes = 0
        self._precision: tuple[Any, ...] = ()
        with on_device(kv_cache.device):
            self.workspace = Workspace(model.spec, self.buckets[-1])
            recipe = _recipe(backend, backend_options or {})
            self._switch(self._resolve(backend, backend_options or {}), recipe)

    @property
    def backend(self) -> AttentionBackend:
        """Return the backend that the next call uses."""
        return self._backend

    @property
    def kept_backends(self) -> tuple[AttentionBackend, ...]:
        """Return the backends that are kept, the one in use first; ``keep_backends`` of them at most."""
        return self._kept.latest()

    @in_turn
    @neutrally("use_backend")
    def use_backend(self, /, backend: AttentionBackend | str, **options: Any) -> AttentionBackend:
        """Switch to ``backend`` for the calls that follow, and return it; captured segments stay as they are.

        A name is looked up in the registry and made with ``options``, or is the backend that was made so before, if it
        is among the ``keep_backends`` last used; options that may change without being seen, such as tensors, always
        make another. Where buckets are captured, a backend is warmed up for them unless it has been, which takes time
        and may compile; one that fails there is not switched to.

        Errors as in ``BackendRegistry.create``, and as raised in the warm-up. Raises CaptureError when full graphs of
        another backend are captured, and NestedCaptureError inside a capture.
        """
        recipe = _recipe(backend, options)
        known = backend if isinstance(backend, AttentionBackend) else self._kept.find(recipe)
        if self.full_graph and self.graphs and known is not self._backend:
            raise CaptureError(
                f"the captured graphs hold the attention of backend {self._backend.name!r}: call release(), switch, "
                "then capture again"
            )
        with on_device(self.kv_cache.device):
            resolved = self._resolve(backend if known is None else known, options)
            if self.graphs:
                self._prepared.add(resolved, self.graphs, self.workspace.boundary)
        self._switch(resolved, recipe)
        return resolved

    def _switch(self, backend: AttentionBackend, recipe: Hashable) -> None:
        self._backend = backend
        for dropped in self._kept.use(backend, recipe):
            self._prepared.drop(dropped)
            self.stats.dropped_backends[dropped.name] += 1

    def _resolve(
        self, backend: AttentionBackend | str, options: dict[str, Any]
    ) -> AttentionBackend:
        spec = AttentionSpec.of(self.model.spec, page_size=self.kv_cache.page_size)
        if isinstance(backend, AttentionBackend):
            if backend.spec != spec:
                raise UnsupportedSpecError(
                    backend.name, f"made for {backend.spec}, but this runner needs {spec}"
                )
            return backend
        return BackendRegistry().create(backend, spec, self.limits, self.kv_cache.device, **options)

    @in_turn
    @neutrally("capture")
    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Warm up, then capture every bucket from the largest to the smallest.

        A bucket that runs out of memory is left out and reported; its batches go to a larger bucket or run eagerly. Any
        other exception reaches the caller as raised, and the runner has the graphs it had before.

        Args:
            progress: called after each warm-up and each capture.

        Raises CaptureError when there are graphs already, NestedCaptureError inside a capture, and UnsupportedSpecError
        for a full graph that the backend cannot give.
        """
        if self.graphs:
            raise CaptureError("this runner has captured already: call release() first")
        report = progress or (lambda done, total: None)
        with on_device(self.kv_cache.device):
            return self._capture_all(sorted(self.buckets, reverse=True), report)

    def _capture_all(self, sizes: list[int], report: Progress) -> CaptureReport:
        started = perf_counter()
        self._precision = matmul_precision(self.kv_cache.device)
        failed: dict[int, str] = {}
        if self.full_graph:
            self._full_metadata = self._prepared.add_full_graphs(
                self._backend, sizes, self.workspace.boundary
            )
        for done, size in enumerate(sizes):
            with _attempting("in warm-up of", size, failed), self.engine.warming_up():
                self._run_model(Phase.WARM_UP, self.workspace, size)
            report(done + 1, 2 * len(sizes))
        warmed = perf_counter()
        graphs: dict[int, BreakableCUDAGraph] = {}
        captured: list[CapturedBucket] = []
        self._growth()
        with no_garbage_collection():
            for done, size in enumerate(sizes):
                if size not in failed:
                    with _attempting("at capture of", size, failed):
                        graphs[size], bucket = self._capture_bucket(size)
                        captured.append(bucket)
                    if size in failed:
                        self._growth()  # what a failure left is not counted for the next bucket
                report(len(sizes) + done + 1, 2 * len(sizes))
        if graphs:
            self._prepared.add(self._backend, graphs, self.workspace.boundary)
            self._captured = TokenBuckets(sorted(graphs))
        self.graphs = graphs
        return CaptureReport(
            buckets=tuple(captured),
            failed=failed,
            warm_up_seconds=warmed - started,
            memory_bytes=self._held_bytes,
        )

    def _capture_bucket(self, size: int) -> tuple[BreakableCUDAGraph, CapturedBucket]:
        begun = perf_counter()
        graph = BreakableCUDAGraph(self.engine)
        with BreakableCUDAGraphCapture(graph, inline_breaks=self.full_graph):
            self._run_model(Phase.CAPTURE, self.workspace, size)
        seconds = perf_counter() - begun
        return graph, CapturedBucket(
            bucket=size,
            segments=len(graph.segments),
            breaks=len(graph.breaks),
            seconds=seconds,
            memory_bytes=self._growth(),
        )

    def _growth(self) -> int:
        """Return by how many bytes the recorded segments have grown since the last call."""
        before, self._held_bytes = self._held_bytes, self.engine.memory_bytes()
        return self._held_bytes - before

    @in_turn
    def release(self) -> None:
        """Drop all captured graphs and their memory; ``capture`` can be called again.

        Backends are kept. Raises NestedCaptureError inside a capture.
        """
        for graph in self.graphs.values():
            graph.reset()
        self.graphs, self._captured, self._full_metadata = {}, None, {}
        self._prepared.clear()

    def admit(self, batch: PrefillBatch) -> Admission:
        """Say what would serve ``batch`` in breakable mode."""
        if self._captured is None:
            return _NO_BUCKET
        return self._captured.select(batch.num_tokens)

    @in_turn
    @torch.inference_mode()
    def prefill(
        self,
        batch: PrefillBatch,
        *,
        mode: Mode | str = Mode.BREAKABLE,
        sample: Callable[[Tensor], Tensor] = greedy,
    ) -> PrefillResult:
        """Run the new tokens of ``batch`` through the model, filling their KV slots.

        All work is queued on the current stream of the KV cache's device; nothing synchronises. On success the batch's
        sequences count the new tokens as cached; after an exception they count their prefixes alone, and the runner can
        be used again.

        Args:
            batch: made for this runner's KV cache.
            mode: how to execute, as a Mode or its value.
            sample: maps logits ``[B, V]`` to tokens ``[B]``.

        Raises BatchError, naming the request, for tokens or lengths that the model or the cache cannot hold, for a
        sequence that changed since the batch was made, at the end for one that was freed, trimmed or rewound meanwhile,
        and for a batch beyond the buckets that there is no memory for; a batch that is refused before it runs gives
        back the pages it took. RunnerBusyError during another call, AmbientStateError under a mode of the caller,
        NestedCaptureError inside a capture; ValueError for no mode.
        """
        forwards = self.context.forwards
        try:
            return self._prefill(batch, mode, sample)
        except BaseException as error:
            begun = self.context.forwards > forwards
            place = f"in {self.context.phase.value}" if begun else "before the forward"
            self.stats.failures[f"{type(error).__name__} {place}"] += 1
            raise

    def _prefill(
        self, batch: PrefillBatch, mode: Mode | str, sample: Callable[[Tensor], Tensor]
    ) -> PrefillResult:
        mode = as_mode(mode)
        device = self.kv_cache.device
        with on_device(device):
            clean = neutral("prefill")
            check_batch(batch, self.kv_cache, self.model.spec, self.limits)
            admission = self._admission(batch, mode)
            if admission.bucket is not None:
                check_matmul_precision(self._precision, device)
            padded = self._padded(batch, mode, admission)
            workspace = self.workspace
            with Prefilling(batch):
                with clean:
                    if padded > workspace.max_tokens:
                        workspace = self._larger_workspace(padded)
                    # Ahead of the forward: a copy from ordinary host memory may wait for what is queued before it.
                    last_B = batch.on_device.cu_new_lens[1:] - 1
                    if batch.num_requests:
                        self._forward(batch, workspace, padded, admission)
                    hidden_RD = workspace.hidden_MD[: batch.num_tokens]
                    last_BD = hidden_RD.index_select(0, last_B)
                    logits_BV = self.model.compute_logits(last_BD)
                next_tokens_B = sample(logits_BV)  # the caller's, as the caller left torch
        result = PrefillResult(
            hidden_RD=hidden_RD,
            logits_BV=logits_BV,
            next_tokens_B=next_tokens_B,
            admission=admission,
            padded_tokens=padded,
        )
        self._count(mode, admission)
        return result

    def _larger_workspace(self, tokens: int) -> Workspace:
        try:
            return Workspace(self.model.spec, tokens)
        except BucketError as error:
            raise BatchError(
                f"{tokens} tokens, beyond the largest bucket, need a workspace of their own: {error}; split the batch"
            ) from error

    def _admission(self, batch: PrefillBatch, mode: Mode) -> Admission:
        if not batch.num_requests:
            return _NO_REQUESTS
        if mode is Mode.BREAKABLE:
            return self.admit(batch)
        return _ASKED_FOR

    def _padded(self, batch: PrefillBatch, mode: Mode, admission: Admission) -> int:
        bucket = admission.bucket
        if mode is Mode.PADDED_EAGER:
            bucket = (self._captured or self.buckets).select(batch.num_tokens).bucket
        return batch.num_tokens if bucket is None else bucket

    def _count(self, mode: Mode, admission: Admission) -> None:
        if mode is not Mode.BREAKABLE:
            self.stats.requested[mode.value] += 1
        elif admission.bucket is not None:
            self.stats.replays[admission.bucket] += 1
        else:
            assert admission.reason is not None
            self.stats.fallbacks[admission.reason] += 1

    def _forward(
        self, batch: PrefillBatch, workspace: Workspace, padded: int, admission: Admission
    ) -> None:
        if not self._backend.capabilities.ignores_foreign_nan:
            clear_tails(batch)
        inputs = workspace.inputs(padded)
        workspace.load(batch, inputs)
        metadata = self._prepare(batch, admission)
        self._begin(Phase.EAGER if admission.bucket is None else Phase.REPLAY, workspace, inputs)
        self.context.bind(batch, self._backend, metadata)
        if admission.bucket is None:
            self._compute(workspace, inputs)
        else:
            self.graphs[admission.bucket].replay_here()

    def _prepare(self, batch: PrefillBatch, admission: Admission) -> Metadata:
        backend = self._backend
        try:
            if admission.bucket is None:
                return backend.init_forward_metadata(batch)
            prepared = self._prepared.bucket(backend, admission.bucket)
            return backend.update_bucket_metadata(prepared, batch)
        except BaseException as error:
            add_note(error, f"raised while preparing a batch for backend {backend.name!r}")
            raise

    def _begin(self, phase: Phase, workspace: Workspace, inputs: StaticInputs) -> None:
        self.context.begin(
            phase, workspace.boundary, inputs.input_ids_T.shape[0], inputs.slot_mapping_T
        )

    def _compute(self, workspace: Workspace, inputs: StaticInputs) -> None:
        hidden_TD = self.model.forward(inputs.input_ids_T, inputs.positions_T, self.context)
        workspace.hidden_MD[: hidden_TD.shape[0]].copy_(hidden_TD)

    def _run_model(self, phase: Phase, workspace: Workspace, padded: int) -> None:
        """Run the model on padding alone: token 0 everywhere, written to the reserved page.

        Attention runs only where it is to be captured, over the slots of no request.
        """
        inputs = workspace.inputs(padded)
        if phase is Phase.WARM_UP:
            inputs.packed.zero_()
        self._begin(phase, workspace, inputs)
        if self.full_graph:
            self.context.bind_all(self._backend, self._full_metadata[padded])
        self._compute(workspace, inputs)


def _recipe(backend: AttentionBackend | str, options: dict[str, Any]) -> Hashable:
    """Return what a backend was made of; one that is given was made elsewhere, of nothing that could be named."""
    return recipe_of(backend, options) if isinstance(backend, str) else object()


@contextmanager
def _attempting(what: str, size: int, failed: dict[int, str]) -> Iterator[None]:
    """Make a bucket that runs out of memory an entry of ``failed``; note on other errors which bucket it was."""
    try:
        with noting(f"raised {what} bucket {size}"):
            yield
    except torch.OutOfMemoryError as error:
        failed[size] = f"out of memory: {error}"
