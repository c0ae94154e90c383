"""Descriptions of the machine: from a table, a file, or measured."""
