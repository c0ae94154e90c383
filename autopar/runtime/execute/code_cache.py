"""Code that Inductor compiled, kept in a directory that processes may share.

A function is found there by what it was made of: nothing is traced again then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.gc_paused import gc_paused
from autopar.runtime import kernels
from autopar.runtime.comm import placement
from autopar.version import VERSION

if TYPE_CHECKING:
    from autopar.runtime.execute.inductor import CompiledFunction

LOG = logging.getLogger("autopar")
STAMP, CODE = "versions.json", "inductor"
PAUSE = 5.0  # seconds between lines of progress
Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Compiled:
    """A function that Inductor compiled. writes: indices of the arguments that it
    overwrites. nothing: indices of results that are None, which `run` does not
    return."""

    run: Callable[..., Any]
    writes: tuple[int, ...]
    nothing: tuple[int, ...] = ()


_in_memory: dict[str, Compiled] = {}  # of this process, by key


class CodeCache:
    """A directory of compiled code, which all processes of a run may share.

    directory: made when something is compiled; None: a directory of this user's, for
    temporary files. who: whose lines these are, which the log tells the user. taken:
    keys of what functions run, since a module was remembered last.
    """

    def __init__(self, directory: Path | None = None, who: str = "") -> None:
        self.directory, self.who = directory, who
        self.compiled = 0  # functions
        self.refused: list[str] = []  # lines on functions that run as they are written
        self._told: set[str] = set()
        self.taken: list[str] = []  # keys, since the last module was remembered
        self._since = time.monotonic()
        self._checked = False

    def say(self, line: str) -> None:
        """Logs a line."""
        LOG.warning(f"{self.who}: {line}" if self.who else line)

    def say_once(self, line: str) -> None:
        """Logs a line the first time."""
        if line not in self._told:
            self._told.add(line)
            self.say(line)

    def refuse(self, line: str) -> None:
        """Notes, and logs once, why something is not compiled."""
        if line not in self.refused:
            self.refused.append(line)
            self.say(line)

    def take(
        self, function: CompiledFunction, signature: Signature, args: tuple[Any, ...]
    ) -> Compiled:
        """A function as compiled before, here or elsewhere, or now. Raises whatever
        Inductor raises."""
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        key = _key(function.source, signature, device or torch.device("cpu"))
        if key not in _in_memory:
            folder = self._folder()
            with _one_at_a_time(folder / f"{key}.lock"), _inductor(folder, device) as i:
                _in_memory[key] = self._load(i, folder / key) or self._compile(
                    i, folder / key, function, args
                )
        self.taken.append(key)
        return _in_memory[key]

    @gc_paused()  # imports of Inductor, of which a quarter would be that
    def preload(self, text: str, device: torch.device) -> bool:
        """Loads the compiled functions of a module, see `remember`; returns whether
        they are known."""
        folder = self._folder()
        try:
            keys = json.loads((folder / _listed(text, device)).read_text())
        except (OSError, ValueError):
            return False
        with _inductor(folder, device) as inductor:
            for key in keys:
                artifact = _in_memory.get(key) or self._load(inductor, folder / key)
                if artifact is not None:
                    _in_memory[key] = artifact
        return True

    def remember(self, text: str, device: torch.device) -> None:
        """All functions of a module are compiled now, or refused."""
        path = self._folder() / _listed(text, device)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(self.taken))
        scratch.replace(path)
        self.taken = []

    def _load(self, inductor: Any, path: Path) -> Compiled | None:
        if not path.is_file():
            return None
        # It was made for this processor: there is no need to compile a file to see
        # whether g++ knows its instructions.
        known = import_module("torch._inductor.config").patch("cpp.vec_isa_ok", True)
        try:
            numbers = map(tuple, json.loads(_numbers_of(path).read_text()))
            with known:
                run = inductor.CompiledArtifact.load(path=str(path), format="binary")
            return Compiled(run, *numbers)
        except Exception as error:
            self.say_once(
                f"compiled code in {path.parent} cannot be read, and is compiled "
                f"again: {path.name}: {type(error).__name__}"
            )
            path.unlink(missing_ok=True)
            return None

    def _compile(
        self,
        inductor: Any,
        path: Path,
        function: CompiledFunction,
        args: tuple[Any, ...],
    ) -> Compiled:
        self._progress(function, path.parent)
        graph, fakes, *numbers = function.traced(args)
        made = inductor.standalone_compile(graph, fakes, dynamic_shapes="from_graph")
        _numbers_of(path).write_text(json.dumps(numbers))
        try:
            made.save(path=str(path), format="binary")
        except Exception as error:
            self.say_once(
                f"{function.name} ({function.place}) is compiled again by each "
                f"process, as it cannot be kept: {type(error).__name__}: {error}"
            )
        return Compiled(made, *map(tuple, numbers))

    def _progress(self, function: CompiledFunction, folder: Path) -> None:
        self.compiled += 1
        now = time.monotonic()
        if self.compiled == 1:
            self.say(f"Inductor compiles functions, and keeps them in {folder}")
        elif now - self._since < PAUSE:
            return
        else:
            self.say(f"Inductor compiles function {self.compiled}: {function.name}")
        self._since = now

    def _folder(self) -> Path:
        """The directory, cleared of other versions' files."""
        if not self._checked:
            self._checked = True
            self.directory = _writable(self.directory)
            with _one_at_a_time(self.directory / "versions.lock"):
                self._check_versions(self.directory)
        assert self.directory is not None, "it was just made"
        return self.directory

    def _check_versions(self, folder: Path) -> None:
        stamp, ours = folder / STAMP, _versions()
        try:
            theirs = json.loads(stamp.read_text())
        except (OSError, ValueError):
            theirs = None
        if theirs == ours:
            return
        old = [p for p in folder.iterdir() if p.suffix != ".lock"]
        if old:
            of = theirs if isinstance(theirs, dict) else {}
            was = ", ".join(f"{k} {of.get(k, '?')}" for k in ours)
            now = ", ".join(f"{k} {v}" for k, v in ours.items())
            self.say(
                f"compiled code in {folder} is of {was}, and this is {now}: it is "
                "compiled again"
            )
        for path in old:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        stamp.write_text(json.dumps(ours) + "\n")


def _versions() -> dict[str, str]:
    return {
        "autopar": VERSION,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _writable(directory: Path | None) -> Path:
    """The directory, or one for temporary files where that cannot be written."""
    usual = Path(tempfile.gettempdir()) / f"autopar-{os.getuid()}" / "compiled"
    for folder in (directory, usual):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="autopar-compiled-"))


def _key(source: str, signature: Signature, device: torch.device) -> str:
    """The key of compiled code, beside versions."""
    config = import_module("torch._inductor.config")
    made_of = (source, signature, _own_code(), _processor(device), config.get_hash())
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]


def _numbers_of(path: Path) -> Path:
    """The file beside compiled code with the other fields of `Compiled`."""
    return path.with_suffix(".numbers")


def _listed(text: str, device: torch.device) -> str:
    """The file that has the keys of a module's functions."""
    return f"{_key(text, (), device)}.json"


@cache
def _own_code() -> str:
    """Returns a digest of the kernels that functions call and are compiled with."""
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    texts = [path.read_bytes() for path in (*files, Path(placement.__file__))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _processor(device: torch.device) -> tuple[Any, ...]:
    if device.type == "cuda":
        tf32 = torch.backends.cuda.matmul.fp32_precision
        return torch.cuda.get_device_name(device), tf32
    return torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Locks a directory: the next process finds what the one before has compiled."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _inductor(folder: Path, device: torch.device | None) -> Iterator[Any]:
    """`torch._inductor`, with its own files in a directory."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(folder / CODE)
    config = import_module("torch._inductor.config")
    on_cpu = device is None or device.type == "cpu"
    try:
        # For a CPU there is one file to compile: processes to do so would only start.
        with (
            config.patch({"compile_threads": 1} if on_cpu else {}),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of torch, about torch
            import_module("torch._inductor.standalone_compile")
            yield import_module("torch._inductor")
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
