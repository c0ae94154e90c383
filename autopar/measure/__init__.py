"""Measuring what ops, messages and updates take on this machine."""
