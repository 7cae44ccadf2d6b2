"""The command on a real checkpoint with a real text."""

import json
import os
from collections import defaultdict
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, registry
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


# Its activations reach thousands, whose squares are beyond float16.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_zeroed_page_table_is_found_in_float16(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'gguf'")
    values = {"right": "MaskBackend", "zeroed": "ZeroesPageTable"}
    points = {
        name: [EntryPoint(name, f"bcg_harness.testing:{value}", ENTRY_POINT_GROUP)]
        for name, value in values.items()
    }
    monkeypatch.setattr(registry, "_installed", lambda: points)
    out = tmp_path / "out.json"
    options = ["--dtype", "float16", "--buckets", "8,32", "--case", "two-requests"]
    files = ["--text", str(text), "--json", str(out)]
    result = CliRunner().invoke(app, ["check", "--model", GGUF, *options, *files])
    assert result.exit_code == 1, result.output
    outcomes: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for found in json.loads(out.read_text())["results"]:
        outcomes[found["backend"]][found["check"]] = found["outcome"]
    assert set(outcomes["right"].values()) == {"passed"}
    assert outcomes["zeroed"]["attention"] == outcomes["zeroed"]["oracle"] == "failed"
