"""Commands and links of README and the guides exist, and the Python of data.md runs."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import output_of, torchrun_command

import autopar
from autopar.cli import parser
from autopar.commands.config_file import ConfigError, with_config

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "examples" / "guides").glob("*.md"))]
TEXTS = {guide.stem: guide.read_text() for guide in GUIDES}
COMMANDS = [
    (name, command)
    for name, text in TEXTS.items()
    for command in re.findall(
        r"^    (?:torchrun .* -m )?(autopar .*?)(?: > .*)?$", text, re.M
    )
    if "..." not in command
]


@pytest.mark.parametrize(("guide", "command"), COMMANDS)
def test_commands_parse(guide: str, command: str) -> None:
    arguments = parser().parse_args(shlex.split(command, comments=True)[1:])
    assert callable(arguments.command)


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings: lower case, no punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", GUIDES, ids=list(TEXTS))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in links:
        target = (page.parent / path) if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target.read_text()), (path, anchor)


def test_readme_links_every_guide() -> None:
    assert all(f"(examples/guides/{g.name})" in TEXTS["README"] for g in GUIDES[1:])


def test_the_file_of_options_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXTS["data"], re.DOTALL)
    (tmp_path / "run.toml").write_text(text)
    line = ["--config", str(tmp_path / "run.toml")]
    given = parser().parse_args(["run", *line])
    given.argv = ["run", *line]
    found = with_config(given.parser, given, line)
    assert (found.steps, found.devices, len(found.data)) == (10000, "4", 2)
    (tmp_path / "run.toml").write_text(text.replace("steps", "step"))
    with pytest.raises(ConfigError, match="did you mean steps"):
        with_config(given.parser, given, line)


@pytest.mark.nightly
def test_a_loop_of_ones_own_runs(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="needs autopar[data]")
    (script,) = re.findall(r"```python\n(.*?)```", TEXTS["data"], re.DOTALL)
    if find_spec("autopar.examples") is None:  # the checkout is not installed
        script = script.replace("autopar.examples", "examples")
    (tmp_path / "script.py").write_text(script)
    output_of([*torchrun_command(2), str(tmp_path / "script.py")], tmp_path)
    assert len(list((tmp_path / "runs").glob("step-*"))) == 2


@pytest.mark.slow
def test_docstrings_make_pages_of_the_api(tmp_path: Path) -> None:
    """As the guide's command does."""
    pdoc = pytest.importorskip("pdoc", reason="needs autopar[docs]")
    [line] = re.findall(r"&& (pdoc .*)$", TEXTS["api"], re.MULTILINE)
    _, *modules, _, _ = shlex.split(line)
    pdoc.pdoc(*modules, output_directory=tmp_path)
    page = (tmp_path / "autopar.html").read_text()
    for name in autopar.__all__:
        assert f'<section id="{name}">' in page and getattr(autopar, name).__doc__
    assert "microbatches" in page and [*tmp_path.glob("*/*")] == []
