"""The command on a real checkpoint with a real text."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcg_harness.cli import app

GGUF = os.environ.get("BCG_SMOLLM2_GGUF", "")

pytestmark = pytest.mark.skipif(
    not GGUF, reason="set BCG_SMOLLM2_GGUF to the path of SmolLM2-135M's GGUF file"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A prefill is captured in segments, with attention in the breaks. " * 20)
    return path


# Raised inside gguf and transformers, which read the file.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_gguf_checkpoint_passes_on_a_text(text: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'gguf'")
    cases = ["--case", "two-requests", "--case", "two-chunks", "--case", "one-token"]
    result = CliRunner().invoke(
        app, ["check", "--model", GGUF, "--text", str(text), "--buckets", "16,64", *cases]
    )
    assert result.exit_code == 0, result.output
    assert "30 layers, D 576, 9/3 heads of 64" in " ".join(result.output.split())
