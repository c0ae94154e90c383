"""What depends on files or on the machine; all else is in pyproject.toml.

The long description is README.md without its links to files, which lead nowhere once
it is not beside them.

A wheel takes any torch that the test suite has passed on, or at least its quick part,
as does a checkout where one is installed. Where none is, the checkout's range ends at
2.13, as pip takes the newest that it may: the suite runs on that one every day, and a
machine that has a wheel of it for CPUs takes no 5 GB of CUDA.
"""

import re
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from setuptools import setup

PICTURE = r"^\[?!\[[^\]]*\]\([^)]*\)(?:\]\([^)]*\))?\n+"
LINK = r"\[([^\]]+)\]\((?!https?:|#)[^)]*\)"

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(PICTURE, "", text, flags=re.MULTILINE)
# Where the installing Python keeps packages: an isolated build has others of its own.
installed = any(distributions(name="torch", path=[sysconfig.get_path("purelib")]))
end = "2.16" if installed or "bdist_wheel" in sys.argv else "2.14"
setup(
    install_requires=[
        f"torch>=2.11,<{end}",
        "numpy>=1.26",  # torch warns at import without it
        "networkx>=3.1",
        "sympy>=1.13",
        "tabulate>=0.9",
        "tomli>=2; python_version < '3.11'",
    ],
    long_description=re.sub(LINK, r"\1", text),
    long_description_content_type="text/markdown",
)
