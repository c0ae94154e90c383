"""Prices plans: seconds and bytes of their parts, on some machine."""
