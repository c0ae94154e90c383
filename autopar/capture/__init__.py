"""Capturing a live model: what is traced, and what a trace alone does not see."""
