"""Functions that make models, by name: `file.py:factory` or `module:factory`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from autopar.passes.errors import AutoparError
from autopar.passes.ranges import shown

# Frames that do not help a user.
OURS = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen")


class ModelError(AutoparError):
    """A model specification that names nothing, or nothing that can be trained."""


def find_factory(spec: str) -> Callable[[], Any]:
    """Imports the factory that `file.py:name` or `module:name` names. Raises
    ModelError."""
    where, colon, name = spec.rpartition(":")
    if not (where and colon and name):
        forms = "write file.py:factory, module:factory, hf:gpt2 or hf:config.json"
        fix = forms
        if spec.endswith(".py"):
            fix = f"{forms}: {spec}:FACTORY, a function in it"
        elif spec and ":" not in spec:
            fix = f"for a model of Hugging Face write hf:{spec}, else {forms}"
        raise ModelError(f"{shown(spec)} does not name a model", fix=fix)
    module = _from_file(Path(where)) if where.endswith(".py") else _by_name(where)
    factory = getattr(module, name, None)
    if isinstance(factory, nn.Module):
        raise ModelError(
            f"'{spec}' is a model, not a function that makes one",
            fix="write one in that file, as: def make(): return Model(...)",
        )
    if callable(factory):
        return factory
    names = [n for n, v in vars(module).items() if inspect.isfunction(v)]
    raise ModelError(f"'{where}' has no function '{name}'", fix=near(name, names))


def _from_file(path: Path) -> Any:
    """Import a file under a name of its own; what lies beside it, or where we are, can
    be imported."""
    if not path.is_file():
        raise ModelError(
            f"there is no file '{path}' (looked in {Path.cwd()})",
            fix="give the path of the Python file that defines the model",
        )
    name = f"autopar_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec and spec.loader, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up there.
    sys.modules[name] = module
    _can_import_from(path.resolve().parent, Path.cwd())
    with their_errors(str(path)):
        spec.loader.exec_module(module)
    return module


def _can_import_from(*folders: Path) -> None:
    """Appends folders to `sys.path`, which the command `autopar` does not search."""
    sys.path += [f for f in dict.fromkeys(map(str, folders)) if f not in sys.path]


def check_takes_nothing(spec: str, factory: Callable[[], Any]) -> None:
    """Raises ModelError for a factory that cannot be called without arguments."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        name = spec.rpartition(":")[2]
        raise ModelError(
            f"'{spec}' is called without arguments, but has some: {error}",
            fix=f"name a function that takes none, as: def make(): return {name}(...)",
        ) from None
    except ValueError:  # a function of C's, which does not say what it takes
        return


def _by_name(name: str) -> Any:
    """Import a module of that dotted name, from where we are or from a package."""
    missing = ModelError(
        f"there is no module {shown(name)}",
        fix="write file.py:factory for a file, or install the module's package",
    )
    if not all(map(str.isidentifier, name.split("."))):
        raise missing
    _can_import_from(Path.cwd())
    with their_errors(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and needs another
            raise missing from None


@contextlib.contextmanager
def their_errors(spec: str) -> Iterator[None]:
    """Shows errors of the user's code, with the traceback from there on."""
    try:
        yield
    except AutoparError:
        raise
    except SystemExit as error:
        raise ModelError(
            f"'{spec}' ended the program: sys.exit({error.code!r})",
            fix="put what a script does under: if __name__ == '__main__':",
        ) from None
    except Exception as error:
        told = traceback.TracebackException.from_exception(error)
        told.stack = traceback.StackSummary.from_list(
            [f for f in told.stack if not f.filename.startswith(OURS)]
        )
        text = "".join(told.format()).rstrip()
        fix = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            fix = f"pip install {package}, or start where a module of that name lies"
        raise ModelError(f"'{spec}' raised an error\n{text}", fix=fix) from error


def near(name: str, known: list[str]) -> str:
    """Returns a fix that names the closest of the known names, or all."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are {', '.join(sorted(known)[:20])}" if known else "write one there"
