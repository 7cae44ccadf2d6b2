"""The model that a run is about, and the tokens that it is fed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bcg_core import CheckpointError
from bcg_harness.errors import HarnessError
from bcg_harness.memory import has_to_fit
from bcg_harness.tokens import RandomTokens, TextTokens, TokenSource
from bcg_llama import PRESETS, LlamaModel, load_llama, load_tokenizer, random_llama


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedModel:
    """Hold a model and where it came from.

    Attributes:
        name: as it was asked for.
        model: ready to run.
        checkpoint: directory, file or hub id of its weights; None when they are random.
    """

    name: str
    model: LlamaModel
    checkpoint: str | None

    def token_source(self, text: str | None, *, seed: int) -> TokenSource:
        """Return random tokens, or those of ``text`` by the model's own tokenizer.

        Raises HarnessError for a built-in model, which has no tokenizer.
        """
        if text is None:
            return RandomTokens(self.model.spec.vocab_size, seed=seed)
        if self.checkpoint is None:
            raise HarnessError(
                f"model {self.name!r} is built in and has no tokenizer: leave out --text, or give a checkpoint with "
                "--model"
            )
        token_ids = load_tokenizer(self.checkpoint).encode(text, verbose=False)
        return TextTokens([int(token) for token in token_ids])


def resolve_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ResolvedModel:
    """Make the preset called ``name`` with random weights, or load the checkpoint that ``name`` means.

    Raises CheckpointError, naming the presets as well, when it is neither, and HarnessError when it does not fit.
    """
    with has_to_fit(
        f"model {name!r} in {dtype} on {device}", hint="choose a smaller model or a 16-bit dtype"
    ):
        if name in PRESETS:
            model = random_llama(PRESETS[name], dtype=dtype, device=device, seed=seed)
            return ResolvedModel(name=name, model=model, checkpoint=None)
        try:
            model = load_llama(name, dtype=dtype, device=device, progress=progress)
        except CheckpointError as error:
            if Path(name).exists():
                raise
            raise CheckpointError(f"{error}; built-in models are {', '.join(PRESETS)}") from error
    return ResolvedModel(name=name, model=model, checkpoint=name)
