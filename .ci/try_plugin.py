"""Write a plug-in, install it, and run the conformance kit on it outside the repository, as a stranger would.

Run by ``tox -e conformance``, in whose environment the built wheel is installed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "ci-stranger"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INSTALL = [*PIP, "install", "--quiet", "--force-reinstall", "--no-deps", "--no-build-isolation"]
UNINSTALL = [*PIP, "uninstall", "--quiet", "--yes", NAME]
KIT = ["pytest", "--pyargs", "bcg_harness.conformance", "--bcg-backend", NAME]


def run(*command: str, folder: Path, status: int = 0) -> None:
    """Run ``command`` in ``folder``, and stop unless it ends with ``status``."""
    print(f"\n$ {' '.join(command)}", flush=True)
    found = subprocess.run(command, cwd=folder, check=False).returncode
    if found != status:
        sys.exit(f"expected status {status}, found {found}")


def main() -> None:
    """Prove that the kit passes what was just written, and fails it once there is a fault in it."""
    with tempfile.TemporaryDirectory() as temporary:
        outside, empty = Path(temporary), Path(temporary, "empty")
        empty.mkdir()
        run(*UNINSTALL, folder=outside)  # what a run that failed left behind
        run("bcg", "new-backend", NAME, folder=outside)
        run(*INSTALL, f"./{NAME}", folder=outside)
        run("bcg", "check", "--backend", NAME, "--case", "two-requests", folder=empty)
        run(*KIT, "--bcg-report", "report.json", folder=empty)

        source = outside / NAME / "src" / "ci_stranger" / "attention.py"
        source.write_text(source.read_text().replace("scale=self.spec.scale", "scale=0.1"))
        run(*INSTALL, f"./{NAME}", folder=outside)
        run(*KIT, "--bcg-case", "two-requests", "--tb=no", folder=empty, status=1)
        run(*UNINSTALL, folder=outside)


if __name__ == "__main__":
    main()
