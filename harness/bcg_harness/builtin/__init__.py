"""The cases that every backend is held to, sized by buckets and pages."""

from bcg_harness.builtin.catalogue import builtin_cases

__all__ = ["builtin_cases"]
