"""The compiled program that a command is about."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.planner.compile_planned import compiled
from autopar.plans.store import StoredPlan


def load_stored(directory: Path) -> StoredPlan:
    """Load a plan, compiled if need be; warnings go to stderr."""
    stored = compiled(directory)
    for warning in stored.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return stored
