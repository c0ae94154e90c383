"""Measuring: ops, messages and updates of this machine."""
