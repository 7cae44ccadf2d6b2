"""The ``bcg`` command. Nothing heavy is imported before a subcommand runs, so that help is quick."""

from bcg_harness.cli.command import app, main

__all__ = ["app", "main"]
