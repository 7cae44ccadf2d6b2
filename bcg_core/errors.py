"""The exceptions of this project, as one tree.

    BcgError
    ├── CaptureError (RuntimeError)        a capture or replay that cannot go on
    │   ├── NestedCaptureError             a capture or replay inside a capture
    │   ├── HostReadError                  a segment reads a device value on the host
    │   └── BreakOutputError               a break returned something else than at capture
    ├── RunnerBusyError (RuntimeError)     a call of a runner during another one; names both
    ├── BatchError (ValueError)            a batch that does not add up; names the request
    ├── BucketError (ValueError)           a bucket ladder that makes no sense
    ├── KVCacheError (ValueError)          pages or slots that the cache does not have
    ├── BackendError                       anything about an attention backend; carries its name
    │   ├── UnknownBackendError            no entry point of that name (LookupError)
    │   ├── DuplicateBackendError          two distributions claim one name
    │   ├── BackendLoadError               the entry point fails to import or is no backend
    │   ├── BackendUnavailableError        vendor library or device is missing
    │   ├── BackendOptionError             the backend does not take that option (TypeError)
    │   ├── UnsupportedSpecError           the backend cannot serve this shape, dtype or page size
    │   └── BackendContractError           the backend broke the protocol during a forward
    ├── AmbientStateError (RuntimeError)   torch is in a state that would change what is recorded or replayed
    ├── CheckpointError (ValueError)       weights or configuration that cannot be loaded
    └── DebugError (RuntimeError)          what a tool of bcg_core.debug found; only raised where one is on
        ├── StaleTensorError               a tensor that a segment reads was replaced, moved or freed
        ├── HiddenOutputError              a tensor left a break without being returned by it
        ├── PaddingLeakError               NaN from padded rows, or from nowhere, in a result
        ├── StrayWriteError                a forward changed KV slots that are not its batch's
        ├── StreamError                    a break left work on another stream, or another stream current
        └── SynchronisationError           a break made the host wait for the device, undeclared

An exception raised by user code (a break, a model, a backend) reaches the caller as it was raised; the library adds a
note that says where it happened.
"""

import pickle
from typing import Any

PASSED_ON = (KeyboardInterrupt, GeneratorExit)
"""What ends a run or a generator, whoever's code it meets.

Whatever else comes out of a plug-in is its fault: also what derives from BaseException alone, such as SystemExit or the
skips of pytest.
"""


class BcgError(Exception):
    """Be the base of every error this project raises on purpose.

    It can be pickled and copied with its attributes and notes, whatever arguments a subclass takes: so a worker's
    failure reaches the process that waits for it. The cause comes along where it can be pickled itself.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make this error again, without calling ``__init__``."""
        state = self.__dict__.copy()
        if self.__cause__ is not None and _can_be_pickled(self.__cause__):
            state["__cause__"] = self.__cause__
        return _bare, (type(self), self.args), state


def _bare(kind: type[BcgError], args: tuple[Any, ...]) -> BcgError:
    return kind.__new__(kind, *args)


def _can_be_pickled(error: BaseException) -> bool:
    # Whatever class it is: many raise only when they are read, and not always the same.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return False
    return True


class CaptureError(BcgError, RuntimeError):
    """Report a capture or a replay that cannot go on."""


class NestedCaptureError(CaptureError):
    """Report a capture or a replay that was started inside a capture."""


class HostReadError(CaptureError):
    """Report a segment that reads a device value on the host, as ``.item()`` does."""


class BreakOutputError(CaptureError):
    """Report a break whose result differs in structure, shape, dtype or device from the captured one."""


class RunnerBusyError(BcgError, RuntimeError):
    """Report a call of a runner while another one of the same runner uses its memory."""


class BatchError(BcgError, ValueError):
    """Report a batch that does not add up."""


class BucketError(BcgError, ValueError):
    """Report a bucket ladder that makes no sense."""


class KVCacheError(BcgError, ValueError):
    """Report pages or slots that the KV cache does not have."""


class BackendError(BcgError):
    """Report a problem with an attention backend.

    Attributes:
        backend: the name of the backend, as registered or as asked for.
        reason: what is wrong, without the name.
    """

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(f"attention backend {backend!r}: {message}")
        self.backend = backend
        self.reason = message


class UnknownBackendError(BackendError, LookupError):
    """Report a backend name that no installed distribution registers."""


class DuplicateBackendError(BackendError):
    """Report a backend name that two distributions register."""


class BackendLoadError(BackendError):
    """Report an entry point that fails to import, or whose object is no attention backend."""


class BackendUnavailableError(BackendError):
    """Report a backend whose vendor library or device is missing."""


class BackendOptionError(BackendError, TypeError):
    """Report an option that the backend does not take."""


class UnsupportedSpecError(BackendError):
    """Report an attention shape, dtype or page size that the backend cannot serve."""


class BackendContractError(BackendError):
    """Report a backend that broke the protocol during a forward."""


class AmbientStateError(BcgError, RuntimeError):
    """Report a call under a mode or setting of torch that would leak into what is recorded or replayed."""


class CheckpointError(BcgError, ValueError):
    """Report weights or a configuration that cannot be loaded."""


class DebugError(BcgError, RuntimeError):
    """Report what a tool of ``bcg_core.debug`` found; be the base of all that they find."""


class StaleTensorError(DebugError):
    """Report a tensor that a segment reads where it was at capture, and that is elsewhere now or nowhere."""


class HiddenOutputError(DebugError):
    """Report a tensor that a break made and did not return, and that a segment or another break was given."""


class PaddingLeakError(DebugError):
    """Report a result that is not finite after a replay whose padded rows were poisoned."""


class StrayWriteError(DebugError):
    """Report a forward that changed KV slots which do not belong to its batch."""


class StreamError(DebugError):
    """Report a break that left work on another stream, or another stream current."""


class SynchronisationError(DebugError):
    """Report a break that made the host wait for the device, where the backend declares that it does not."""
