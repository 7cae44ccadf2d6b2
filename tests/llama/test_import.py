"""Importing the package is cheap: no Hugging Face library, no GGUF reader."""

import subprocess
import sys

import pytest

CODE = "import sys, bcg_llama; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Return the top-level modules that a fresh interpreter has after the import."""
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("library", ["accelerate", "gguf", "huggingface_hub", "transformers"])
def test_import_leaves_out(library: str, imported: set[str]) -> None:
    assert "bcg_llama" in imported
    assert library not in imported
