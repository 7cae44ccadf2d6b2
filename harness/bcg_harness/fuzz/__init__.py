"""Random batch compositions: what is drawn, run through the matrix, and shrunk when it fails.

``bcg fuzz`` is the command. Everything is a pure function of a seed and a number, so a failure can be had again.
"""
