"""The Python that the guides show of scripts and models is true; README is a page."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import output_of, torchrun_command

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "examples" / "guides"
TEXT = (GUIDES / "api.md").read_text() + (GUIDES / "models.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SCRIPTS = [block for block in BLOCKS if "import autopar" in block]


def test_the_readme_is_a_page_of_what_guides_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    measured = re.findall(r"\d\.\d+", text[text.index("Measured:") :])
    guide = (GUIDES / "long-sequences.md").read_text()
    assert measured and all(f" {number} " in guide for number in measured)


def test_the_guides_have_scripts() -> None:
    assert len(SCRIPTS) == 2


def test_the_layer_is_that_of_the_example() -> None:
    source = (ROOT / "examples" / "gpt.py").read_text()
    layer = next(block for block in BLOCKS if "class Attention" in block)
    for line in layer.splitlines():
        if "=" in line and "attention(" not in line:
            assert line.strip() in source


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=["torchrun", "offline"])
def test_scripts_run(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    if find_spec("autopar.examples") is None:  # the checkout is not installed
        script = script.replace("autopar.examples", "examples")
    path.write_text(script)
    command = [sys.executable, str(path)]
    if "step(" in script:
        command = [*torchrun_command(4), str(path)]
    output_of(command, tmp_path)
    assert (tmp_path / "model.pt").is_file() == ("torch.save" in script)
