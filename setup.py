"""The long description: README.md without its links to files, which lead nowhere once
it is not beside them. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

PICTURE = r"^\[?!\[[^\]]*\]\([^)]*\)(?:\]\([^)]*\))?\n+"
LINK = r"\[([^\]]+)\]\((?!https?:|#)[^)]*\)"

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(PICTURE, "", text, flags=re.MULTILINE)
setup(
    long_description=re.sub(LINK, r"\1", text),
    long_description_content_type="text/markdown",
)
