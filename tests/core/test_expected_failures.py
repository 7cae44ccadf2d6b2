"""A backend may declare what is known to fail; by default nothing is."""

from bcg_core import AttentionBackend


def test_nothing_is_expected_to_fail_by_default() -> None:
    assert AttentionBackend.expected_failures() == {}
