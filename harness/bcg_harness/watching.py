"""Whether the debug tools of the core watch what is checked: what ``--debug`` and ``--bcg-debug`` stand for."""

from bcg_core import PrefillRunner


def runner_type(*, debug: bool) -> type[PrefillRunner]:
    """Return the runner to check with: an ordinary one, or with ``debug`` one that every tool watches."""
    if not debug:
        return PrefillRunner
    from bcg_core.debug import WatchedRunner

    return WatchedRunner
