"""Which cases, buckets, device and types a run is about."""

from collections.abc import Sequence
from pathlib import Path

import torch

from bcg_core import BcgError, TokenBuckets
from bcg_harness.builtin import builtin_cases
from bcg_harness.cases import Case, read_cases
from bcg_harness.errors import CaseError, HarnessError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Element types by the names that the command takes."""

MOST_TOKENS = 2**20
"""The largest bucket that makes sense: a thousand times what saturates a GPU."""


def select_cases(
    names: Sequence[str], buckets: TokenBuckets, *, page_size: int, max_context: int
) -> list[Case]:
    """Return the cases called ``names``, or all built-in ones; a name that ends in ``.json`` is a file of cases.

    Raises CaseError, with the known names, for a name that there is no case of.
    """
    sized = builtin_cases(buckets, page_size=page_size, max_context=max_context)
    builtin = {case.name: case for case in sized}
    cases: list[Case] = []
    for name in names:
        if name.endswith(".json"):
            cases += _read_cases(Path(name))
        elif (plain := name.strip().replace(" ", "-")) in builtin:
            cases.append(builtin[plain])
        else:
            raise CaseError(
                f"no case {name!r}; known cases: {', '.join(builtin)} (or the path of a .json file)"
            )
    selected: dict[str, Case] = {}
    for case in cases:
        if selected.setdefault(case.name, case) != case:
            raise CaseError(f"two different cases are called {case.name!r}: rename one of them")
    return list(selected.values()) if names else list(builtin.values())


def parse_buckets(text: str) -> TokenBuckets:
    """Read comma-separated token counts, or the ``.json`` file of a ladder that ``text`` names.

    Raises BucketError or HarnessError for a ladder that makes no sense.
    """
    buckets = TokenBuckets.load(text) if text.endswith(".json") else _listed_buckets(text)
    if max(buckets) > MOST_TOKENS:
        raise HarnessError(
            f"bucket {max(buckets)} is too large: at most {MOST_TOKENS} tokens are possible"
        )
    return buckets


def _listed_buckets(text: str) -> TokenBuckets:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise HarnessError(
            f"buckets {text!r} are no whole numbers with commas between, such as 16,64,256, and no path of a .json file"
        ) from error
    return TokenBuckets(sizes)


def parse_dtype(text: str | None, device: torch.device) -> torch.dtype:
    """Read an element type; None is float32 on a CPU and bfloat16 on a GPU."""
    if text is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if text not in DTYPES:
        raise HarnessError(f"unknown dtype {text!r}; possible are {', '.join(DTYPES)}")
    return DTYPES[text]


def parse_device(text: str, *, option_prefix: str = "--") -> torch.device:
    """Read a device that segments can be captured on.

    ``option_prefix`` is what the options of the command at hand begin with, for advice.

    Raises HarnessError for other devices, and for ``cuda`` where torch sees no GPU.
    """
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise HarnessError(f"unknown device {text!r}; possible are cpu and cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise HarnessError(f"no segment engine for device {text!r}; possible are cpu and cuda")
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if (device.index or 0) >= found:
            raise HarnessError(
                f"device {text!r} asked for, but torch {torch.__version__} sees {found} GPUs: install a CUDA build of "
                f"torch and a driver, or use {option_prefix}device cpu for the emulator"
            )
    return device


def read_text(path: Path) -> str:
    """Return the contents of a UTF-8 file, less a byte order mark; raises HarnessError where there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HarnessError(f"cannot read {path}: {error}; give a UTF-8 text file") from error


def _read_cases(path: Path) -> list[Case]:
    text = read_text(path)
    try:
        return read_cases(text)
    except BcgError as error:
        raise CaseError(f"{path}: {error}") from error
