"""A TOML file that says what the flags of a command say: `--config run.toml`.

    plan = "examples/gpt.py:demo"
    steps = 1000
    data = ["a.bin:0.7", "b.jsonl:0.3"]

Its keys are the flags' names with `_`, and its values are read as the flags' are: there
is no list of options beside the parser's own. A flag that is given wins over the file.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.commands.arguments import Several, add_switch, path
from autopar.commands.parser import Formatter
from autopar.models.factories import near
from autopar.passes.errors import AutoparError
from autopar.passes.ranges import shown
from autopar.read_file import parse_toml, read_text

OWN = ("help", "config", "print_config")
SWITCHES = (argparse.BooleanOptionalAction, argparse._StoreTrueAction)
WIDTH = 88


class ConfigError(AutoparError):
    """A file of options that has what no option is, or a value that none may have."""


def add_config(add: argparse.ArgumentParser) -> None:
    """Add the flags of such files to a command."""
    group = add.add_argument_group("options from a file")
    group.add_argument(
        "--config",
        type=path,
        metavar="FILE",
        help="TOML with options; flags on the command line win",
    )
    add_switch(group, "--print-config", "print such a file of all options, and exit")


def with_config(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, argv: Sequence[str]
) -> argparse.Namespace:
    """The arguments, and for those that argv does not give the file's.

    parsed: argv as it was parsed. Raises: ConfigError.
    """
    if parsed.config is None:
        return parsed
    parser.set_defaults(**_read(parsed.config, parser, parsed))
    merged = parser.parse_args(argv)
    merged.argv = parsed.argv
    return merged


def config_text(
    parser: argparse.ArgumentParser,
    values: argparse.Namespace,
    helps: Mapping[str, str],
) -> str:
    """A file of these values, with the help of each option. helps: see `helps_of`."""
    lines = [f"# {parser.prog} --config THIS_FILE"]
    for title, actions in _groups(parser):
        lines += ["", f"# --- {title}", ""]
        for action in actions:
            about = textwrap.wrap(helps[action.dest], WIDTH - 2)
            lines += [f"# {line}" for line in about]
            value = getattr(values, action.dest)
            if value in (None, [], ()):
                name = str(action.metavar or action.dest.upper())
                kind = _toml(isinstance(action, SWITCHES) or name)
                lines.append(f"# {action.dest} = {kind}")
            else:
                lines.append(f"{action.dest} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def helps_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The help of each option, with its default."""
    told = {}
    for _, actions in _groups(parser):
        for action in actions:
            about = Formatter(parser.prog)._expand_help(action)
            choices = map(str, action.choices or ())
            told[action.dest] = f"{about} [{', '.join(choices)}]".replace(" []", "")
    return told


def _groups(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, list[argparse.Action]]]:
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest not in OWN]
        if actions:
            yield group.title or "", actions


def _read(
    file: Path, parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> dict[str, Any]:
    """The values of a file, by the names of arguments."""
    fix = f"write one with all options: {parser.prog} --print-config"
    table = parse_toml(read_text(file, ConfigError, fix), f"'{file}'", ConfigError)
    known = {
        action.dest: action for _, actions in _groups(parser) for action in actions
    }
    values = {}
    for key, value in table.items():
        if key not in known:
            meant = [name for name, action in known.items() if _stands_for(action, key)]
            raise ConfigError(
                f"'{file}' has '{key}', and there is no such option",
                fix=f"write {meant[0]} = ..." if meant else near(key, list(known)),
            )
        values[key] = _value(known[key], value, f"'{file}': {key} = {shown(value)}")
    for group in parser._mutually_exclusive_groups:
        names = [action.dest for action in group._group_actions]
        both = [name for name in names if name in values]
        if any(getattr(parsed, n) is not parser.get_default(n) for n in names):
            for name in both:  # the flag of another one wins over it
                del values[name]
        elif len(both) > 1:
            raise ConfigError(
                f"'{file}' has both '{both[0]}' and '{both[1]}'", fix="leave one out"
            )
    return values


def _stands_for(action: argparse.Action, word: str) -> bool:
    """Whether help calls a positional argument so: `plan` is a PLAN or a MODEL."""
    words = str(action.metavar).lower().split("|")
    return not action.option_strings and word in words


def _value(action: argparse.Action, value: Any, where: str) -> Any:
    """The value that the flag would have. Raises: ConfigError."""
    if isinstance(action, Several):
        several = value if isinstance(value, list) else [value]
        if not several:
            raise ConfigError(f"{where} is empty", fix="leave it out, or give a value")
        return tuple(_one(action, one, where) for one in several)
    return _one(action, value, where)


def _one(action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(action, SWITCHES) or isinstance(value, bool):
        if isinstance(action, SWITCHES) and isinstance(value, bool):
            return value
        kind = "true or false" if isinstance(action, SWITCHES) else "a value, not that"
        raise ConfigError(where, fix=f"give {kind}")
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where} is no single value", fix="give text or a number")
    written = value if isinstance(value, str) else repr(value)
    if action.choices is not None and written not in action.choices:
        fix = f"use one of {', '.join(map(str, action.choices))}"
        raise ConfigError(where, fix=fix)
    if not callable(action.type):
        return written
    try:
        return action.type(written)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}", fix="give another value") from None


def _toml(value: Any) -> str:
    """A value as TOML has it, of which basic strings are as JSON's."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
