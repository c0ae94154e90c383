"""Writes the text that one rank of a pipeline stage runs, from the whole graph."""
