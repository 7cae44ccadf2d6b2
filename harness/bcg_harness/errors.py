"""The harness's own exceptions; the tree of the whole project stands in ``bcg_core.errors``.

BcgError
└── HarnessError (ValueError)     a wrong use of the harness: what was asked, what is possible, how to fix it
    ├── CaseError                 a case that describes nothing that can be run
    └── DeviceLostError           something left the GPU unusable for this process
"""

from bcg_core.errors import BcgError


class HarnessError(BcgError, ValueError):
    """Report a wrong use of the harness; the command exits with status 2 for it."""


class CaseError(HarnessError):
    """Report a case that describes nothing that can be run."""


class DeviceLostError(HarnessError):
    """Report that an illegal access or the like left the GPU unusable for the rest of the process."""
