"""Do random things to a runner and its KV cache, and compare with a model of the cache in plain Python.

Usage: python operation_sequences.py SEQUENCES [--seed N] [--device cuda] [--backend NAME[k=v] ...]; prints a JSON
record, and exits with 1 at the first thing that differs: a page held or free that should not be, a token count, an
owner, a result that a fresh runner does not give for the same tokens, or an error that is not the one that must come.

Shape letters: V vocabulary.
"""

import argparse
import json
import random
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bcg_core import (
    AmbientStateError,
    AttentionBackend,
    BatchError,
    Capabilities,
    Chunk,
    KVCacheError,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    RunnerBusyError,
    TokenBuckets,
)
from bcg_harness.candidates import parse_label
from bcg_harness.environment import Environment
from bcg_llama import PRESETS, random_llama

NAN_TOKEN = 7
"""Its embedding is NaN, and so is everything that sees it."""
MOST_NEW, MOST_SEQUENCES = 12, 5
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Relative L2 of logits; wrong keys or positions give 0.2 and more."""


class MistakeError(Exception):
    """What fails on purpose."""


class PageBackend(AttentionBackend):
    """Attend over whole pages and multiply what lies behind a request's last token by 0, as fast kernels do."""

    name: ClassVar[str] = "pages"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
        cached_prefix=True,
        deterministic=True,
    )

    def init_forward_metadata(self, batch: PrefillBatch) -> PrefillBatch:
        """Keep the batch."""
        return batch

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: PrefillBatch,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend request by request, over all slots of its pages."""
        rows, group = [], self.spec.group_size
        for number, pages in enumerate(metadata.pages or ((),) * metadata.num_requests):
            first, stop = metadata.cu_new_lens[number : number + 2]
            slots = torch.tensor(pages or (0,), device=q_RNH.device)
            keys, values = (
                part[slots].flatten(0, 1).float().repeat_interleave(group, 1)
                for part in (kv_cache.keys(layer), kv_cache.values(layer))
            )
            seen = torch.arange(keys.shape[0], device=q_RNH.device)
            last = metadata.prefix_lens[number] + torch.arange(stop - first, device=q_RNH.device)
            logits = torch.einsum("qnh,snh->nqs", q_RNH[first:stop].float(), keys)
            hidden = seen[None] > last[:, None]
            weights = (logits * self.spec.scale).masked_fill(hidden, -torch.inf).softmax(-1)
            rows.append(torch.einsum("nqs,snh->qnh", weights, values))
        return torch.cat(rows).to(q_RNH.dtype)


class Page:
    """Stand for a page; compared by identity."""


@dataclass(eq=False)
class Request:
    """Model one sequence: its pages, and the tokens that are written in them."""

    sequence: KVSequence = field(default_factory=KVSequence)
    pages: list[Page] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


class World:
    """Hold a runner, its cache, and the model of that cache."""

    def __init__(
        self, *, seed: int, device: str, dtype: torch.dtype, backends: list[str], page_size: int
    ) -> None:
        self.random = random.Random(seed)
        config = replace(PRESETS["tiny"], num_layers=2, vocab_size=64)
        self.model = random_llama(config, dtype=dtype, device=device)
        self.model.weights.embedding_VD[NAN_TOKEN] = torch.nan
        self.size = page_size
        self.total = 13
        self.cache = PagedKVCache(self.model.spec, num_pages=1 + self.total, page_size=page_size)
        self.runner = self.make_runner(self.cache, PageBackend.name)
        room = PagedKVCache(self.model.spec, num_pages=2 + 400 // page_size, page_size=page_size)
        self.plain = self.make_runner(room, "sdpa")
        self.backends = [PageBackend.name, *backends]
        self.requests: list[Request] = []
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.done: Counter[str] = Counter()
        self.log: list[str] = []
        self.captured = False

    def make_runner(self, cache: PagedKVCache, backend: str) -> PrefillRunner:
        runner = PrefillRunner(
            self.model, cache, "sdpa", buckets=TokenBuckets([4, 16]), max_requests=8
        )
        if backend == PageBackend.name:
            self.pages = PageBackend(runner.backend.spec, runner.limits, cache.device)
            runner.use_backend(self.pages)
        return runner

    # What must hold after every operation

    def check(self) -> None:
        held = {page for request in self.requests for page in request.pages}
        self.same("free pages", self.cache.free_pages, self.total - len(held))
        for number, request in enumerate(self.requests):
            sequence = request.sequence
            self.same(f"cached tokens of {number}", sequence.cached, request.cached)
            self.same(f"pages of {number}", len(sequence.pages), len(request.pages))
            for at, (page, model) in enumerate(zip(sequence.pages, request.pages, strict=True)):
                owners = set(self.cache.owner_of(page))
                holders = {other.sequence for other in self.requests if model in other.pages}
                self.same(f"owners of page {at} of {number}", owners, holders)

    def same(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise AssertionError(f"{what}: {found}, expected {expected}")

    def right(self, logits_V: Tensor, tokens: list[int]) -> None:
        """Compare with a fresh runner that prefills ``tokens`` in one pass."""
        if NAN_TOKEN in tokens:
            return
        key = tuple(tokens)
        if key not in self.known:
            sequence = KVSequence()
            chunk = Chunk(token_ids=tokens, sequence=sequence)
            batch = PrefillBatch.from_chunks([chunk], self.plain.kv_cache)
            self.known[key] = self.plain.prefill(batch, mode=Mode.EAGER).logits_BV[0].double()
            self.plain.kv_cache.free(sequence)
        expected_V = self.known[key]
        error = float((logits_V.double() - expected_V).norm() / expected_V.norm())
        if not error <= TOLERANCE[self.model.spec.dtype]:
            raise AssertionError(f"logits behind {len(tokens)} tokens are {error:.2g} off")

    # The model of the cache

    def free_pages(self) -> int:
        return self.total - len({page for request in self.requests for page in request.pages})

    def take(self, chunks: list[tuple[Request, int, int]]) -> bool:
        """Give the requests of (request, prefix, new tokens) pages of their own to write; False when there are too few.

        Nothing is taken then.
        """
        free, before = self.free_pages(), [list(request.pages) for request, _, _ in chunks]
        for request, prefix, new in chunks:
            stop = -(-(prefix + new) // self.size)
            request.pages += [Page() for _ in range(stop - len(request.pages))]
            for at in range(prefix // self.size, stop):
                if any(
                    request.pages[at] in other.pages
                    for other in self.requests
                    if other is not request
                ):
                    request.pages[at] = Page()
        fits = self.free_pages() >= 0
        if not fits:
            for (request, _, _), pages in zip(chunks, before, strict=True):
                request.pages = pages
            self.same("free pages of the model", self.free_pages(), free)
        return fits

    # What is done

    def step(self) -> None:
        operations: list[tuple[int, Callable[[], None]]] = [
            (8, self.prefill),
            (3, self.fork),
            (2, self.rewind),
            (3, self.free),
            (1, self.trim),
            (1, self.switch),
            (1, self.recapture),
            (1, self.abort_capture),
            (3, self.fail_in_a_hook),
            (2, self.refuse),
            (1, self.call_from_inside),
            (1, self.free_meanwhile),
            (1, self.two_threads),
            (2, self.under_ambient_state),
        ]
        weights, actions = zip(*operations, strict=True)
        (action,) = self.random.choices(actions, weights)
        self.log.append(action.__name__)
        action()
        self.done[action.__name__] += 1
        self.check()

    def pick(self) -> Request | None:
        return self.random.choice(self.requests) if self.requests else None

    def tokens(self) -> list[int]:
        new = [self.random.randrange(8, 64) for _ in range(self.random.randint(1, MOST_NEW))]
        if self.random.random() < 0.15:
            new[self.random.randrange(len(new))] = NAN_TOKEN
        return new

    def chunks(self) -> list[tuple[Request, int, list[int]]]:
        """Choose what to prefill: new requests and old ones, behind all that is cached or less."""
        full = len(self.requests) == MOST_SEQUENCES
        count = min(len(self.requests), self.random.randint(int(full), 2))
        chosen = self.random.sample(self.requests, count)
        if not full and (not chosen or self.random.random() < 0.5):
            chosen.append(Request())
            self.requests.append(chosen[-1])
        prefixes = [
            self.random.randint(0, request.cached) if self.random.random() < 0.2 else request.cached
            for request in chosen
        ]
        return [
            (request, prefix, self.tokens())
            for request, prefix in zip(chosen, prefixes, strict=True)
        ]

    def batch(self, chunks: list[tuple[Request, int, list[int]]]) -> PrefillBatch | None:
        """Build the batch; None where the model says that pages run out, and the cache says so too."""
        asked = [
            Chunk(token_ids=new, sequence=request.sequence, prefix_len=prefix)
            for request, prefix, new in chunks
        ]
        if self.take([(request, prefix, len(new)) for request, prefix, new in chunks]):
            return PrefillBatch.from_chunks(asked, self.cache)
        with self.refused(KVCacheError):
            PrefillBatch.from_chunks(asked, self.cache)
        return None

    @contextmanager
    def refused(self, kind: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kind:
            return
        raise AssertionError(f"no {kind.__name__} came")

    def prefill(self) -> None:
        chunks = self.chunks()
        batch = self.batch(chunks)
        if batch is not None:
            self.run(batch, chunks)

    def run(self, batch: PrefillBatch, chunks: list[tuple[Request, int, list[int]]]) -> None:
        mode = self.random.choices(list(Mode), [6, 1, 1])[0]
        result = self.runner.prefill(batch, mode=mode)
        self.commit(chunks)
        for row, (request, _, _) in enumerate(chunks):
            self.right(result.logits_BV[row], request.tokens)

    def commit(self, chunks: list[tuple[Request, int, list[int]]]) -> None:
        seen = [NAN_TOKEN in request.tokens[:prefix] + new for request, prefix, new in chunks]
        # A kernel that multiplies masked values by 0 spoils the tokens before one in the same chunk, too; and one that
        # loads the keys of a batch in tiles, its neighbours in that batch. No other batch may ever see it.
        backend = self.runner.backend
        tiles = not backend.capabilities.ignores_foreign_nan and backend is not self.pages
        for (request, prefix, new), spoilt in zip(chunks, seen, strict=True):
            written = [NAN_TOKEN] * len(new) if spoilt or (tiles and any(seen)) else new
            request.tokens = request.tokens[:prefix] + written
            request.cached = len(request.tokens)

    def fail(self, chunks: list[tuple[Request, int, list[int]]]) -> None:
        """Model a prefill that began and raised: only the prefixes count."""
        for request, prefix, _ in chunks:
            request.tokens = request.tokens[:prefix]
            request.cached = prefix

    def fork(self) -> None:
        parent = self.pick()
        if parent is None or len(self.requests) >= MOST_SEQUENCES:
            return
        shared = self.random.choice([None, self.random.randint(0, parent.cached)])
        sequence = self.cache.fork(parent.sequence, shared)
        count = parent.cached if shared is None else shared
        pages = parent.pages[: -(-count // self.size)]
        self.requests.append(Request(sequence, list(pages), parent.tokens[:count], count))

    def rewind(self) -> None:
        if (request := self.pick()) is not None:
            request.cached = self.random.randint(0, len(request.tokens))
            request.sequence.cached = request.cached

    def free(self) -> None:
        if (request := self.pick()) is not None:
            self.cache.free(request.sequence)
            self.requests.remove(request)

    def trim(self) -> None:
        if (request := self.pick()) is not None:
            keep = self.random.randint(0, len(request.pages))
            self.cache.trim(request.sequence, keep)
            request.pages = request.pages[:keep]
            request.tokens = request.tokens[: keep * self.size]
            request.cached = min(request.cached, keep * self.size)

    def switch(self) -> None:
        name = self.random.choice(self.backends)
        if name == PageBackend.name:
            self.runner.use_backend(self.pages)
        else:
            base, options = parse_label(name)
            self.runner.use_backend(base, **options)

    def recapture(self) -> None:
        if self.captured:
            self.runner.release()
        else:
            self.runner.capture()
        self.captured = not self.captured

    def abort_capture(self) -> None:
        self.runner.release()
        self.captured = False
        steps = self.random.randint(1, 4)

        def stop(done: int, total: int) -> None:
            if done == steps:
                raise MistakeError

        with self.refused(MistakeError):
            self.runner.capture(stop)
        if self.random.random() < 0.7:
            self.recapture()

    def fail_in_a_hook(self) -> None:
        chunks = self.chunks()
        batch = self.batch(chunks)
        if batch is None:
            return
        hook = self.random.choice(["init_forward_metadata", "forward", "sample", "logits"])
        self.log.append(hook)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise MistakeError

        with self.refused(MistakeError):
            if hook == "sample":
                self.runner.prefill(batch, sample=fail)
            elif hook == "logits":
                with replaced(self.model, "compute_logits", fail):
                    self.runner.prefill(batch)
            else:
                # Eager for the second: a bucket's metadata may be refreshed without it.
                with replaced(self.runner.backend, hook, fail):
                    self.runner.prefill(batch, mode=Mode.EAGER)
        self.fail(chunks)

    def refuse(self) -> None:
        """Ask for what is refused before anything runs: pages that were taken come back."""
        chunks = self.chunks()
        chunks[0][2][-1] = 64  # not in the vocabulary
        held = [list(request.pages) for request, _, _ in chunks]
        batch = self.batch(chunks)
        if batch is None:
            return
        copied = [list(request.pages) for request, _, _ in chunks]
        with self.refused(BatchError):
            self.runner.prefill(batch)
        for (request, _, _), before, after in zip(chunks, held, copied, strict=True):
            request.pages = after[: len(before)]

    def call_from_inside(self) -> None:
        chunks = self.chunks()
        batch = self.batch(chunks)
        if batch is None:
            return
        calls: list[Callable[[], Any]] = [
            lambda: self.runner.prefill(batch),
            self.runner.capture,
            self.runner.release,
            lambda: self.runner.use_backend("sdpa"),
        ]
        call = self.random.choice(calls)
        with self.refused(RunnerBusyError):
            self.runner.prefill(batch, sample=lambda logits: call())
        self.fail(chunks)

    def free_meanwhile(self) -> None:
        """Free a sequence during its own prefill: refused at the end, and its pages are free then."""
        chunks = self.chunks()
        batch = self.batch(chunks)
        if batch is None:
            return
        gone = self.random.choice(chunks)[0]

        def sample(logits_BV: Tensor) -> Tensor:
            self.cache.free(gone.sequence)
            return logits_BV.argmax(-1)

        with self.refused(BatchError):
            self.runner.prefill(batch, sample=sample)
        self.fail(chunks)
        gone.pages, gone.tokens, gone.cached = [], [], 0

    def two_threads(self) -> None:
        """Prefill two batches in two threads at once."""
        work = []
        for _ in range(2):
            taken = {id(request) for chunks, _ in work for request, _, _ in chunks}
            chunks = [chunk for chunk in self.chunks() if id(chunk[0]) not in taken]
            batch = self.batch(chunks) if chunks else None
            if batch is not None:
                work.append((chunks, batch))
        results: dict[int, Any] = {}

        def serve(number: int) -> None:
            try:
                results[number] = self.runner.prefill(work[number][1]).logits_BV
            except Exception as error:  # noqa: BLE001  # shown below
                results[number] = error

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, (chunks, _) in enumerate(work):
            if isinstance(results[number], Exception):
                raise results[number]
            self.commit(chunks)
            for row, (request, _, _) in enumerate(chunks):
                self.right(results[number][row], request.tokens)

    def under_ambient_state(self) -> None:
        name, state = self.random.choice(list(self.states().items()))
        self.log.append(name)
        chunks = self.chunks()
        held = [list(request.pages) for request, _, _ in chunks]
        built = False
        try:
            with state:
                batch = self.batch(chunks)
                if batch is None:
                    return
                built = True
                if self.captured and self.random.random() < 0.3:
                    self.recapture()
                    self.recapture()
                result = self.runner.prefill(batch)
        except AmbientStateError:
            if name != "flop counter":
                raise
            # Refused before anything ran: in the making of the batch, in a capture, or in the prefill.
            self.captured = bool(self.runner.graphs)
            if not built:
                for (request, _, _), pages in zip(chunks, held, strict=True):
                    request.pages = pages
            return
        self.commit(chunks)
        for row, (request, _, _) in enumerate(chunks):
            self.right(result.logits_BV[row], request.tokens)

    def states(self) -> dict[str, AbstractContextManager[Any]]:
        device = self.cache.device.type
        states: dict[str, AbstractContextManager[Any]] = {
            "autocast": torch.autocast(device, dtype=torch.bfloat16),
            "default device": torch.device("meta"),
            "default dtype": switched(
                torch.get_default_dtype, torch.set_default_dtype, torch.float64
            ),
            "anomalies": torch.autograd.set_detect_anomaly(True),
            "inference mode": torch.inference_mode(),
            "grad": torch.enable_grad(),
            "flop counter": FlopCounterMode(display=False),
        }
        if device == "cuda":
            states["stream"] = torch.cuda.stream(torch.cuda.Stream())
        return states

    def sequence(self, length: int) -> None:
        """Do ``length`` random things, then free everything and see that all pages are back."""
        self.log = []
        for _ in range(length):
            self.step()
        while self.requests:
            self.free()
            self.check()


@contextmanager
def replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Give ``target`` an attribute of its own while the block runs."""
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)


@contextmanager
def switched(get: Callable[[], Any], set_: Callable[[Any], None], value: Any) -> Iterator[None]:
    """Set something of torch while the block runs."""
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def main() -> int:
    """Run, and print what was done or what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sequences", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--backend", action="append", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = World(
        seed=given.seed,
        device=given.device,
        dtype=getattr(torch, given.dtype),
        backends=given.backend or ["sdpa"],
        page_size=given.page_size,
    )
    started = perf_counter()
    failure = None
    done = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done in range(1, given.sequences + 1):
            try:
                world.sequence(given.length)
            except Exception as error:  # noqa: BLE001  # reported with what led to it
                failure = {
                    "sequence": done,
                    "operations": world.log,
                    "backend": world.runner.backend.name,
                    "error": "".join(traceback.format_exception(error)),
                }
                break
    record = {
        "environment": asdict(Environment.of(torch.device(given.device))),
        "options": vars(given),
        "backends": world.backends,
        "sequences": done,
        "operations": dict(sorted(world.done.items())),
        "replays": {str(bucket): count for bucket, count in world.runner.stats.replays.items()},
        "seconds": round(perf_counter() - started, 1),
        "failure": failure,
    }
    print(json.dumps(record, default=str))
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
