"""Graphs print, and what they print is read again."""

from __future__ import annotations
