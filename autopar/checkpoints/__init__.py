"""Saving a step and its optimizer, and loading them on any mesh."""
