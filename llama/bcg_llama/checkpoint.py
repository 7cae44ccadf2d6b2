"""What a checkpoint file offers, and how it becomes the weights of a model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama.config import LlamaConfig
from bcg_llama.names import EMBEDDING, HEAD, other_names
from bcg_llama.weights import LlamaWeights


class CheckpointWarning(UserWarning):
    """Tell of something in a checkpoint that was left out or not understood, though a model was loaded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Describe an opened checkpoint; tensors go by their Hugging Face names.

    Attributes:
        path: where it came from, for errors.
        config: the shape of the model.
        dtype: what the weights are meant to be computed in.
        shapes: every tensor it holds.
        tensors: reads them one by one, on the CPU; a tensor may be a view of a mapped file.
        notes: what was left out or not understood, and what to do about it.
    """

    path: Path
    config: LlamaConfig
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    notes: tuple[str, ...] = ()

    def copy_to(
        self, weights: LlamaWeights, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Copy every tensor into ``weights``, converting dtype and device on the way; ``check`` it first.

        ``progress`` is called with the tensors copied so far and their total. Raises CheckpointError at the end when
        the head should be tied to the embedding but differs from it.
        """
        targets = dict(weights.named_tensors())
        tied_head: Tensor | None = None
        done = 0
        for name, tensor in self.tensors():
            if name in targets:
                targets[name].copy_(tensor)
                done += 1
                if progress is not None:
                    progress(done, len(targets))
            elif name == HEAD:
                tied_head = tensor
        if tied_head is not None and not torch.equal(
            tied_head.to(weights.head_VD.dtype), weights.head_VD.cpu()
        ):
            raise CheckpointError(
                f"{self.path}: the configuration ties the head to the embedding (tie_word_embeddings), but {HEAD} and "
                f"{EMBEDDING} differ; correct tie_word_embeddings or remove {HEAD}"
            )

    def check(self) -> None:
        """Compare names and shapes with those that the configured model needs, before memory is spent on it.

        Raises CheckpointError with every difference of one kind.
        """
        needed = needed_shapes(self.config)
        if missing := needed.keys() - self.shapes.keys():
            hint = other_names(missing, self.shapes.keys() - needed.keys())
            if missing == {HEAD}:
                hint = "; is the head tied (tie_word_embeddings)?"
            noted = "".join(f"; {note}" for note in self.notes)
            raise CheckpointError(f"{self.path}: {listed('missing tensor', missing)}{hint}{noted}")
        # A tied head may be stored all the same, and old checkpoints carry RoPE frequencies that follow from the
        # configuration.
        allowed = {**needed, HEAD: needed[EMBEDDING]} if self.config.tie_word_embeddings else needed
        extra = {name for name in self.shapes if not name.endswith("rotary_emb.inv_freq")}
        if extra := extra - allowed.keys():
            raise CheckpointError(
                f"{self.path}: {listed('tensor', extra)} that the configured model does not have"
            )
        if wrong := [
            f"{name} is {self.shapes[name]}, expected {shape}"
            for name, shape in allowed.items()
            if self.shapes.get(name, shape) != shape
        ]:
            raise CheckpointError(f"{self.path}: {listed('wrong shape', wrong)}")


def needed_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a model needs, by its Hugging Face name; a tied head is not repeated."""
    weights = LlamaWeights.empty(config, dtype=torch.float32, device=torch.device("meta"))
    return {name: tuple(tensor.shape) for name, tensor in weights.named_tensors()}


def listed(what: str, items: Iterable[str]) -> str:
    """Return ``2 whats: a, b`` for an error message, cut after a few."""
    names = sorted(items)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''}: {shown}"
