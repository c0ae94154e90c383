"""Fixtures of the whole test suite."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite what goldens hold"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text is that of `golden/<name>.txt`, line by line."""

    def compare(name: str, text: str) -> None:
        path = pathlib.Path(__file__).parent / "golden" / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text.splitlines() == path.read_text().splitlines(), (
            f"{path.name} differs; if the new text is right: pytest --update-golden"
        )

    return compare
