"""Bench results as one HTML page that needs no network, and as PNGs of its charts; ``bcg report`` is the command."""
