"""What is made besides a backend under test, until its cases are done."""

from collections.abc import Callable
from functools import cached_property

from bcg_core import AttentionBackend, PrefillBatch
from bcg_core.warm_up import warm_up_batches
from bcg_harness.full_graph import FullGraphs
from bcg_harness.layer_trial import LayerTrial
from bcg_harness.stage import Stage


class Companions:
    """Make further instances of a backend when a check asks for them, each once.

    Args:
        stage: where the backend runs.
        make: makes an instance with the options of the one under test.

    Attributes:
        full_graphs: a runner with full graphs of an instance of its own.
    """

    def __init__(self, stage: Stage, make: Callable[[], AttentionBackend]) -> None:
        self._stage = stage
        self._make = make
        self.full_graphs = FullGraphs(stage, make)

    @cached_property
    def twin(self) -> AttentionBackend:
        """Return a second instance, warmed up for the smallest bucket."""
        stage, twin = self._stage, self._make()
        batches = warm_up_batches(
            [min(stage.runner.buckets)],
            twin.limits,
            stage.kv_cache,
            cached_prefix=twin.capabilities.cached_prefix,
        )

        def run(batch: PrefillBatch) -> None:
            LayerTrial(batch, stage.model.spec, scale=stage.spec.scale).run(twin)

        twin.warm_up(batches, run)
        return twin

    def release(self) -> None:
        """Drop what holds memory."""
        self.full_graphs.release()
        vars(self).pop("twin", None)
