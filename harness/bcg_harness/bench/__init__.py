"""How fast prefill is: execution modes side by side, over backends and workloads.

``pytest --pyargs bcg_harness.bench`` runs the same measurements under pytest-benchmark; ``bcg bench`` is the command.
"""
