"""Rows that the data choose, and loops over experts."""
