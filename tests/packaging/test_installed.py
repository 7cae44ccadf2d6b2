"""In CI the installed wheel is tested, not the source tree beside the tests."""

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ["bcg_core", "bcg_backends", "bcg_llama", "bcg_harness"]


@pytest.mark.skipif(
    "BCG_EXPECT_INSTALLED" not in os.environ,
    reason="says something only where the wheel is installed; tox sets BCG_EXPECT_INSTALLED",
)
@pytest.mark.parametrize("package", PACKAGES)
def test_package_comes_from_site_packages(package: str) -> None:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(sysconfig.get_path("purelib"))
