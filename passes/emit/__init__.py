"""Writes the nodes that a rank runs of a stage as a Python module."""
