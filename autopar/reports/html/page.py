"""The page: its data, scripts and styles in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError
from autopar.passes.mesh import AXES, PIPELINE
from autopar.version import VERSION

SCRIPTS = (
    *("core.js", "code.js", "model.js", "ranks.js", "schedule.js", "memory.js"),
    *("why.js", "run.js", "compare.js", "main.js"),
)
SLOT = re.compile(r"<!-- (\w+) -->")


def page(plans: Sequence[dict[str, Any]]) -> str:
    """One HTML file of one plan, or of two beside each other. plans: see `gather`."""
    mesh = {"axes": [*AXES], "pipeline": PIPELINE}
    data = {"version": VERSION, **mesh, "plans": list(plans)}
    # In a script element only `</` could end it.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    title = " and ".join(plan["name"] for plan in plans)
    slots = {
        "title": _escape(f"{title}: autopar"),
        "style": _asset("style.css"),
        "library": _asset("d3.min.js"),
        "scripts": "\n".join(map(_asset, SCRIPTS)),
        "data": text,
    }
    return SLOT.sub(lambda slot: slots[slot[1]], _asset("page.html"))


def write_page(plans: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the page of one or two plans. Raises AutoparError if it cannot."""
    try:
        path.write_text(page(plans), encoding="utf-8", newline="\n")
    except OSError as error:
        raise AutoparError(
            f"cannot write '{path}': {error.strerror}", fix="give another file with -o"
        ) from None


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text("utf-8")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
