"""Loading tokenizers through transformers."""

import sys
from pathlib import Path

import pytest

from bcg_core.errors import CheckpointError
from bcg_llama import load_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with a tokenizer of three words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
def test_tokenizer_of_a_directory(kind: type, directory: Path) -> None:
    assert load_tokenizer(kind(directory))("hello world").input_ids == [1, 2]


def test_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CheckpointError, match="finds no tokenizer"):
        load_tokenizer(tmp_path)


def test_missing_transformers_gives_an_install_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install '.\[hf\]'"):
        load_tokenizer(tmp_path)
