"""Write a plug-in, install it beside the wheel, and run the conformance kit on it, as a stranger would.

Run by ``tox -e conformance``. Wheel and plug-in go into an environment of their own, which is made here and has nothing
of the repository's: neither its packages nor its working directory. Torch and the other dependencies are links to what
tox installed, as they are large and the same: this takes seconds where a download takes minutes.
"""

import subprocess
import sys
import tempfile
import venv
from importlib.metadata import distribution
from pathlib import Path
from sysconfig import get_path

ROOT = Path(__file__).parents[1]
PROJECT = "breakable-cuda-graph"
NAME = "ci-stranger"
PIP = ["-m", "pip", "--disable-pip-version-check"]
INSTALL = [*PIP, "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall"]
KIT = ["-m", "pytest", "--pyargs", "bcg_harness.conformance", "--bcg-backend", NAME]


def run(*command: str, folder: Path, status: int = 0) -> None:
    """Run ``command`` in ``folder``, and stop unless it ends with ``status``."""
    print(f"\n$ {' '.join(command)}", flush=True)
    found = subprocess.run(command, cwd=folder, check=False).returncode
    if found != status:
        sys.exit(f"expected status {status}, found {found}")


def make_environment(folder: Path) -> str:
    """Make an environment with all that is installed here but the project; returns its Python."""
    venv.create(folder, with_pip=False)
    here, there = Path(get_path("purelib")), next(folder.glob("lib/python*/site-packages"))
    own = {path.parts[0] for path in distribution(PROJECT).files or ()}
    for path in here.iterdir():
        if path.name not in own and path.name != "__pycache__":
            (there / path.name).symlink_to(path)
    return str(folder / "bin" / "python")


def main() -> None:
    """Prove that the kit passes what was just written, and fails it once there is a fault in it."""
    with tempfile.TemporaryDirectory() as temporary:
        outside, empty = Path(temporary), Path(temporary, "empty")
        empty.mkdir()
        wheels = str(outside / "wheels")
        build = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        run(sys.executable, *build, "--wheel-dir", wheels, str(ROOT), folder=outside)
        python = make_environment(outside / "environment")
        run(python, *INSTALL, "--find-links", wheels, PROJECT, folder=outside)
        bcg = str(Path(python).with_name("bcg"))
        run(bcg, "new-backend", NAME, folder=outside)
        plugin = [*INSTALL, "--no-build-isolation", f"./{NAME}"]
        run(python, *plugin, folder=outside)
        run(bcg, "check", "--backend", NAME, "--case", "two-requests", folder=empty)
        run(python, *KIT, "--bcg-report", "report.json", folder=empty)

        source = outside / NAME / "src" / "ci_stranger" / "attention.py"
        source.write_text(source.read_text().replace("scale=self.spec.scale", "scale=0.1"))
        run(python, *plugin, folder=outside)
        run(python, *KIT, "--bcg-case", "two-requests", "--tb=no", folder=empty, status=1)


if __name__ == "__main__":
    main()
