"""A whole run: modes times backends times workloads on one model, every cell checked before it is timed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendUnavailableError,
    PagedKVCache,
    TokenBuckets,
    UnsupportedSpecError,
    create_backend,
)
from bcg_core.errors import PASSED_ON
from bcg_core.garbage import no_garbage_collection
from bcg_harness.bench.arena import Arena
from bcg_harness.bench.cell import NO_BACKEND, Cell, Status
from bcg_harness.bench.cell_run import CellRun
from bcg_harness.bench.mode import ExecutionMode, Ground
from bcg_harness.bench.reference import Reference
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.bench.timing import Effort, require_device
from bcg_harness.bench.workloads import Workload, check_fits
from bcg_harness.candidates import Candidate
from bcg_harness.outcome import describe
from bcg_harness.probe import idle_backend
from bcg_harness.progress import NoProgress, Progress
from bcg_harness.tokens import TokenSource
from bcg_llama import LlamaModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Hold what is measured together, in turns.

    Attributes:
        label: what cells call the backend.
        backend: for all of the modes; a stand-in for those with attention of their own.
        modes: in the order of tables.
    """

    label: str
    backend: AttentionBackend
    modes: Sequence[ExecutionMode]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Hold the modes that are ready for a backend, and why others are not.

    Attributes:
        ready: in the order of tables.
        others: status and reason of the rest, by mode.
    """

    ready: tuple[ExecutionMode, ...]
    others: Mapping[str, tuple[Status, str]]


class Bench:
    """Measure modes and backends on workloads. Results collect in the attributes while ``cells`` is iterated.

    Args:
        model: its weights serve all modes.
        workloads: what is prefilled; they size the KV cache. Raises HarnessError for one that the model cannot hold.
        modes: which modes, in the order of tables.
        source: gives the token ids.
        buckets: token counts to capture.
        page_size: tokens a KV page.
        effort: how often to repeat.
        progress: told about long work.

    Attributes:
        ground: what all modes share.
        modes: in the order of tables.
        workloads: what is prefilled.
        arena: gives the batches of one workload at a time.
        progress: told about long work.
        setups: what it took to make modes ready.
        skipped: backends that could not be used, with the reason.
        broken: backends that raised when they were made, with what they raised.
        notes: what backends and modes say of themselves, by label.
    """

    def __init__(
        self,
        model: LlamaModel,
        workloads: Sequence[Workload],
        modes: Sequence[type[ExecutionMode]],
        source: TokenSource,
        *,
        buckets: TokenBuckets,
        page_size: int,
        effort: Effort | None = None,
        progress: Progress | None = None,
    ) -> None:
        spec = model.spec
        for workload in workloads:
            check_fits(workload, spec.max_positions)
        self.workloads = tuple(workloads)
        self._effort = effort or Effort()
        self.progress = progress or NoProgress()
        pages = [workload.kv_pages(page_size) for workload in workloads]
        filled = -(-min(buckets[-1], spec.max_positions) // page_size)
        kv_cache = PagedKVCache(spec, num_pages=max([*pages, filled]) + 1, page_size=page_size)
        self.ground = Ground(
            model=model,
            plain=model if spec.device.type == "cpu" else LlamaModel(model.weights, fuse=False),
            kv_cache=kv_cache,
            buckets=buckets,
            max_requests=max(workload.max_requests for workload in workloads),
            needed=_needed(workloads, buckets),
        )
        self._spec = AttentionSpec.of(spec, page_size=page_size)
        self.arena = Arena(kv_cache, source)
        self._source = source
        self.modes = [mode(self.ground) for mode in modes]
        self._reference: Reference | None = None
        self.setups: list[ModeSetup] = []
        self.skipped: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {}
        self._backends: dict[str, AttentionBackend] = {}

    def compute_reference(self) -> Reference:
        """Compute the reference, once, and return it."""
        if self._reference is None:
            self.progress.start("computing the reference", 1)
            self._reference = Reference(self.ground, self._source)
        return self._reference

    def groups(self, candidates: Sequence[Candidate]) -> Iterator[Group]:
        """Yield what is measured together: modes with attention of their own first, then backend by backend."""
        own = [mode for mode in self.modes if mode.own_attention]
        if own:
            yield Group(label=NO_BACKEND, backend=idle_backend(self._spec), modes=own)
        modes = [mode for mode in self.modes if not mode.own_attention]
        for candidate in candidates:
            backend = self.make(candidate)
            if backend is not None:
                yield Group(label=candidate.label, backend=backend, modes=modes)

    def cells(self, candidates: Sequence[Candidate]) -> Iterator[Cell]:
        """Measure everything, group by group and workload by workload."""
        for group in self.groups(candidates):
            prepared = self.prepare(group)
            name = group.modes[0].name if group.label == NO_BACKEND else group.label
            self.compute_reference()  # which tells of its own progress
            self.progress.start(name, sum(len(each.stretches) for each in self.workloads))
            with no_garbage_collection():
                for workload in self.workloads:
                    yield from self.measure(group, prepared, workload)

    def measure(self, group: Group, prepared: Prepared, workload: Workload) -> list[Cell]:
        """Return a cell for each mode of ``group`` on ``workload``; progress is told of each stretch of it."""
        run = self.enter(group.label, workload)
        cells = {cell.mode: cell for cell in run.measure(prepared.ready, self._effort)}
        cells |= {mode: run.without(mode, *why) for mode, why in prepared.others.items()}
        return [cells[mode.name] for mode in group.modes]

    def make(self, candidate: Candidate) -> AttentionBackend | None:
        """Make a backend, once; None, and an entry in ``skipped`` or ``broken``, where that is not possible."""
        label = candidate.label
        if label in self._backends:
            return self._backends[label]
        limits, device = self.ground.runner.limits, self.ground.device
        try:
            self._backends[label] = create_backend(
                candidate.backend, self._spec, limits, device, **candidate.options
            )
        except (BackendUnavailableError, UnsupportedSpecError) as error:
            self.skipped[label] = str(error)
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  # the plug-in's, whatever it is
            self.broken[label] = describe(error)
        return self._backends.get(label)

    def prepare(self, group: Group) -> Prepared:
        """Make the modes of ``group`` ready for its backend; valid until the next call."""
        label, backend = group.label, group.backend
        ready: list[ExecutionMode] = []
        others: dict[str, tuple[Status, str]] = {}
        for mode in group.modes:
            self.progress.start(f"{label}: preparing {mode.name}", 1)
            reason = mode.unavailable(self.ground.device) or mode.unsupported(backend)
            if reason is not None:
                others[mode.name] = Status.UNAVAILABLE, reason
                continue
            try:
                setup = mode.prepare(backend, label)
            except UnsupportedSpecError as error:
                others[mode.name] = Status.UNAVAILABLE, str(error)
            except PASSED_ON:
                raise
            except BaseException as error:  # noqa: BLE001  # a backend's, torch's, whatever it is
                require_device(self.ground.device, f"preparing mode {mode.name!r} for {label!r}")
                others[mode.name] = Status.ERROR, describe(error)
            else:
                ready.append(mode)
                self._keep(setup)
                self.note(mode.name, mode.notes())
        self.note(label, backend.notes())
        return Prepared(ready=tuple(ready), others=others)

    def _keep(self, setup: ModeSetup) -> None:
        """Keep what took something; a mode is made ready once more for the profiler."""
        known = [(each.backend, each.mode) for each in self.setups]
        nothing = ModeSetup(backend=setup.backend, mode=setup.mode)
        if setup != nothing and (setup.backend, setup.mode) not in known:
            self.setups.append(setup)

    def note(self, label: str, notes: Iterable[str]) -> None:
        """Keep what is said of a backend, mode or workload called ``label``, once."""
        if lines := [line for line in notes if line not in self.notes.get(label, ())]:
            self.notes.setdefault(label, []).extend(lines)

    def enter(self, label: str, workload: Workload) -> CellRun:
        """Make ``workload`` the one at hand, for cells of the backend called ``label``; valid until the next call."""
        self.arena.leave()  # the reference needs pages for its own check
        return CellRun(
            label,
            workload,
            self.arena,
            self.compute_reference(),
            self.ground.kv_cache,
            self.progress,
        )


def _needed(workloads: Iterable[Workload], buckets: TokenBuckets) -> TokenBuckets | None:
    """Return the buckets that timed batches go to; None when there are none."""
    tokens = (count for workload in workloads for count in workload.batch_tokens())
    sizes = {buckets.select(count).bucket for count in tokens}
    return TokenBuckets(sorted(size for size in sizes if size is not None)) if any(sizes) else None
