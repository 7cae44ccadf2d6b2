"""Give a backend its verdict under pytest: ``pytest --pyargs bcg_harness.conformance --bcg-backend NAME``.

An installed test suite that needs nothing of this repository; ``docs/conformance.md`` tells how to use it.
"""
