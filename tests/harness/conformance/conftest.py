"""Toys in a distribution of their own, and the kit run on them, from an empty folder.

In this process, which saves the imports; ``test_from_outside.py`` runs it as a user does.
"""

from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

TOYS = """
from bcg_harness.testing import MaskBackend, NoFloat32, NotInstalled, Raises, ScalesTooMuch


class Known(ScalesTooMuch):
    @classmethod
    def expected_failures(cls):
        return {
            "attention-*": "wrong scale until 2.0",
            "oracle-*": "likewise",
            "full_graph-*": "likewise",
            "nonsense-*": "of old",
        }


class Stale(MaskBackend):
    @classmethod
    def expected_failures(cls):
        return {"attention-two-requests": "wrong scale until 2.0", "oracle-*": "likewise"}


class Skewed(Raises):
    @classmethod
    def expected_failures(cls):
        return {"*-two-requests": "takes one request only"}


class Mute(MaskBackend):
    @classmethod
    def expected_failures(cls):
        return {"oracle-*": " "}


class Unmade(MaskBackend):
    def __init__(self, spec, limits, device):
        raise MemoryError("no workspace")
"""
METADATA = "Metadata-Version: 2.1\nName: toy-backends\nVersion: 3.1.4\n"
ENTRY_POINTS = """[bcg.attention_backends]
right = toys:MaskBackend
wrong = toys:ScalesTooMuch
raising = toys:Raises
gone = toys:NotInstalled
narrow = toys:NoFloat32
broken = no_such_module:Backend
known = toys:Known
stale = toys:Stale
skewed = toys:Skewed
mute = toys:Mute
unmade = toys:Unmade
"""


@dataclass(frozen=True, kw_only=True)
class KitRun:
    """Hold exit status and output of a run."""

    status: int
    output: str

    def outcome_of(self, test: str) -> str:
        """Return the word behind the id of ``test`` in verbose output."""
        marker = f"::test_backend[{test}] "
        lines = [line for line in self.output.splitlines() if marker in line and "%]" in line]
        assert lines, f"no test {test} in\n{self.output}"
        return lines[0].partition(marker)[2].split()[0]


RunKit = Callable[..., KitRun]


@pytest.fixture(scope="package")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a module of toys and the metadata of its distribution."""
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toys.py").write_text(TOYS)
    metadata = folder / "toy_backends-3.1.4.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture(scope="package")
def run_kit(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    """Return a function that runs the kit on a short ladder, in an empty folder unless one is given."""

    def run(*arguments: str, folder: Path | None = None) -> KitRun:
        kit = [
            "--pyargs",
            "bcg_harness.conformance",
            "--bcg-buckets",
            "16,64",
            "-v",
            "--capture=sys",
        ]
        output = StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            chdir(folder or tmp_path_factory.mktemp("empty")),
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            patch.syspath_prepend(toys)
            patch.setenv("COLUMNS", "200")
            patch.setenv("PY_COLORS", "0")
            status = pytest.main([*kit, "-p", "no:cacheprovider", "-W", "default", *arguments])
        return KitRun(status=int(status), output=output.getvalue())

    return run
