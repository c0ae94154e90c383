"""Proves a plan at a size where proving is cheap, and carries the proof over."""
