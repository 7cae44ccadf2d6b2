"""A second runner with one full graph a bucket, for backends that declare that their attention can be captured."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bcg_core import AttentionBackend, KVSequence, Mode, PrefillBatch, PrefillRunner
from bcg_core.debug import poison
from bcg_core.errors import PASSED_ON
from bcg_harness.outcome import describe
from bcg_harness.stage import Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class FullReplay:
    """Hold what a replay of a full graph did, or why there was none.

    Attributes:
        hidden_RD: hidden states of the real rows.
        kv_after: storage of the KV cache afterwards.
        refused: why the backend cannot be captured here, in its own words.
        error: what capture or replay raised, in words.
    """

    hidden_RD: Tensor | None = None
    kv_after: Tensor | None = None
    refused: str | None = None
    error: str | None = None


class FullGraphs:
    """Own a runner whose graphs hold the attention of one backend; captured at first use.

    It shares model and KV cache with ``stage``; the backend is an instance of its own, as these graphs hold its
    addresses. Whatever is raised becomes part of the record: a backend that breaks here may still be right with breaks.

    Args:
        stage: gives model, cache, buckets and limits.
        make: makes the backend.
    """

    def __init__(self, stage: Stage, make: Callable[[], AttentionBackend]) -> None:
        self._stage = stage
        self._make = make
        self._runner: PrefillRunner | None = None
        self._not_captured: FullReplay | None = None

    def replay(self, batch: PrefillBatch, bucket: int) -> FullReplay:
        """Replay ``batch``, which ``bucket`` serves, on poisoned memory."""
        runner = self._captured()
        if runner is None:
            assert self._not_captured is not None
            return self._not_captured
        kv_cache, bystander = batch.kv_cache, KVSequence()
        kv_cache.extend(bystander, 1)
        try:
            poison(
                runner.workspace,
                runner.model.spec,
                bucket,
                page=bystander.pages[0],
                page_size=kv_cache.page_size,
            )
            result = runner.prefill(batch, mode=Mode.BREAKABLE)
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  # the plug-in's, whatever it is
            return FullReplay(error=f"replay raised {describe(error)}")
        finally:
            kv_cache.free(bystander)
        if result.admission.bucket != bucket:
            return FullReplay(error=f"served by bucket {result.admission.bucket}, not {bucket}")
        return FullReplay(
            hidden_RD=result.hidden_RD.clone(), kv_after=kv_cache.storage_L2PSKH.clone()
        )

    def _captured(self) -> PrefillRunner | None:
        if self._runner is None and self._not_captured is None:
            try:
                self._capture()
            except PASSED_ON:
                raise
            except BaseException as error:  # noqa: BLE001  # likewise
                self._not_captured = FullReplay(error=f"capture raised {describe(error)}")
        return self._runner

    def _capture(self) -> None:
        stage, backend = self._stage, self._make()
        refused = backend.refuse_full_graph()
        if refused is not None:
            self._not_captured = FullReplay(refused=refused)
            return
        runner = PrefillRunner(
            stage.model,
            stage.kv_cache,
            backend,
            buckets=stage.runner.buckets,
            max_requests=stage.runner.limits.max_requests,
            full_graph=True,
        )
        failed = runner.capture().failed
        if failed:
            runner.release()
            size, reason = next(iter(failed.items()))
            self._not_captured = FullReplay(error=f"bucket {size} was not captured: {reason}")
            return
        self._runner = runner

    def release(self) -> None:
        """Drop the graphs and their memory; the next replay captures anew."""
        if self._runner is not None:
            self._runner.release()
        self._runner = self._not_captured = None
