"""A server's days in minutes: random batches on one capture, with an eye on everything that must not grow.

``bcg soak`` is the command. What is served is a pure function of a seed, so a failure can be had again.
"""
