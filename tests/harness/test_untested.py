"""What a backend declares beyond what was run is named."""

from dataclasses import replace

import pytest
import torch

from bcg_core import AttentionSpec, Capabilities
from bcg_harness.untested import Untested

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16, page_size=16, scale=0.125
)
NARROW = Capabilities(
    dtypes=frozenset({torch.float16}),
    head_dims=frozenset({64}),
    devices=frozenset({"cpu"}),
    gqa=False,
)


def said(capabilities: Capabilities) -> str:
    return str(Untested.of(capabilities, SPEC, torch.device("cpu")))


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"dtypes": frozenset({torch.float16, torch.bfloat16})}, "bfloat16"),
        ({"head_dims": frozenset({64, 128, 256})}, "head dims 128, 256"),
        ({"head_dims": None}, "other head dims"),
        ({"gqa": True}, "other head groups"),
        ({"devices": frozenset({"cpu", "cuda"})}, "cuda"),
        ({"page_multiple": 8}, "other page sizes (multiples of 8)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_declared_beyond_the_run_is_named(declared: dict[str, object], named: str) -> None:
    assert named not in said(NARROW)
    assert named in said(replace(NARROW, **declared))  # type: ignore[arg-type]


def test_what_was_run_is_not_named() -> None:
    assert said(NARROW) == "declared, not tested here: other page sizes"


def test_everything_is_in_one_line() -> None:
    wide = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
    )
    assert said(wide) == (
        "declared, not tested here: bfloat16, float32; other head dims; other head groups; other page sizes; cuda"
    )
