"""What was asked for is found, or refused with what is possible."""

import json
from pathlib import Path

import pytest
import torch

from bcg_core import (
    BucketError,
    TokenBuckets,
)
from bcg_harness import CaseError, HarnessError
from bcg_harness.candidates import label_of, parse_label
from bcg_harness.selection import (
    parse_buckets,
    parse_device,
    parse_dtype,
    read_text,
    select_cases,
)

BUCKETS = TokenBuckets([16, 64])


def test_no_names_select_all_cases() -> None:
    assert len(select_cases([], BUCKETS, page_size=16, max_context=2048)) > 10


def test_cases_may_be_written_with_spaces() -> None:
    (case,) = select_cases(["two requests"], BUCKETS, page_size=16, max_context=2048)
    assert case.name == "two-requests"


def test_cases_are_sized_by_pages() -> None:
    (case,) = select_cases(["page-edges"], BUCKETS, page_size=256, max_context=2048)
    assert max(case.lengths.values()) > 3 * 256


def test_cases_come_from_files_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", "steps": [{"requests": [[0, 3]]}]}))
    cases = select_cases([str(file), "one-token"], BUCKETS, page_size=16, max_context=2048)
    assert [case.name for case in cases] == ["mine", "one-token"]


def test_a_case_named_twice_is_run_once() -> None:
    assert (
        len(select_cases(["one-token", "one token"], BUCKETS, page_size=16, max_context=2048)) == 1
    )


def test_two_different_cases_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "one-token", "steps": [{"requests": [[0, 3]]}]}))
    with pytest.raises(CaseError, match="two different cases are called 'one-token'"):
        select_cases([str(file), "one-token"], BUCKETS, page_size=16, max_context=2048)


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CaseError, match="one-request, two-requests"):
        select_cases(["three-requests"], BUCKETS, page_size=16, max_context=2048)


def test_a_missing_case_file_is_named() -> None:
    with pytest.raises(HarnessError, match=r"nowhere\.json"):
        select_cases(["nowhere.json"], BUCKETS, page_size=16, max_context=2048)


def test_a_bad_case_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text("[7]")
    with pytest.raises(CaseError, match=r"bad\.json: expected"):
        select_cases([str(file)], BUCKETS, page_size=16, max_context=2048)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param("16,x", HarnessError, id="word"),
        pytest.param("", HarnessError, id="empty"),
        pytest.param("16,1048577", HarnessError, id="large"),
        pytest.param("99999999999", HarnessError, id="huge"),
        pytest.param("9" * 5000, HarnessError, id="absurd"),
        pytest.param("64,16", BucketError, id="descending"),
        pytest.param("16,16", BucketError, id="twice"),
        pytest.param("0,16", BucketError, id="zero"),
        pytest.param("-8", BucketError, id="negative"),
    ],
)
def test_bad_buckets_are_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_buckets(text)


def test_buckets_are_read() -> None:
    assert list(parse_buckets("16, 64,256")) == [16, 64, 256]


@pytest.mark.parametrize(
    ("text", "device", "dtype"),
    [
        (None, "cpu", torch.float32),
        (None, "cuda", torch.bfloat16),
        ("float16", "cpu", torch.float16),
        ("bf16", "cpu", torch.bfloat16),
    ],
)
def test_dtypes_are_read(text: str | None, device: str, dtype: torch.dtype) -> None:
    assert parse_dtype(text, torch.device(device)) == dtype


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HarnessError, match="float32, bfloat16, float16"):
        parse_dtype("int8", torch.device("cpu"))


@pytest.mark.parametrize("text", ["tpu", "mps", "cpu0", ""])
def test_an_unknown_device_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(HarnessError, match="possible are cpu and cuda"):
        parse_device(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(HarnessError, match="--device cpu"):
        parse_device("cuda")


def test_a_missing_file_is_named_once_with_no_hint_about_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.txt"
    with pytest.raises(HarnessError) as caught:
        read_text(path)
    assert str(caught.value) == f"cannot read {path}: No such file or directory"


def test_a_file_of_other_encoding_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(HarnessError, match=r"old\.txt.*give a UTF-8 text file"):
        read_text(path)


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        pytest.param("sdpa", ("sdpa", {}), id="name"),
        pytest.param("a[b=1]", ("a", {"b": "1"}), id="one-option"),
        pytest.param("a[b=1,c=d]", ("a", {"b": "1", "c": "d"}), id="two-options"),
    ],
)
def test_a_label_is_name_and_options(label: str, parts: tuple[str, dict[str, str]]) -> None:
    assert parse_label(label) == parts
    assert label_of(*parts) == label


@pytest.mark.parametrize("label", ["a[", "a[]", "a[b]", "a[b=]", "a[=1]", "a[b=1", "a[b=1]c"])
def test_a_label_that_is_none_is_refused(label: str) -> None:
    with pytest.raises(HarnessError, match="name or name"):
        parse_label(label)
