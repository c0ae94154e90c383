"""Emitted functions compiled by Inductor: each once, for all layers, microbatches,
virtual ranks and restarts.

An emitted module calls functions that take tensors and return tensors, with collectives
between them (see `passes.stage.outline`). `compile_functions` puts a `CompiledFunction`
in the place of each; the module's text stays as it is, and so does what runs between.
A function is traced to ATen operations on tensors without data, compiled for the shapes
and strides that it is called with, and kept in a directory, where the next process
finds it by what it was made of: nothing is traced again then.

Writing over an argument costs Inductor nothing: the last operation of the fused kernel
stores there. Only where that argument shares its memory with another one could kernels
run in an order that shows: such a call runs as it is written.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.gc_paused import gc_paused
from autopar.runtime import kernels
from autopar.runtime.comm import placement
from autopar.runtime.kernels import for_inductor
from autopar.version import VERSION

LOG = logging.getLogger("autopar")
# What the executor calls of a module, with tables and collectives.
ENTRIES = frozenset({"setup", "prologue", "forward", "backward", "epilogue"})
ENTRIES |= {"backward_input", "backward_weight"}
STAMP, CODE = "versions.json", "inductor"
PAUSE = 5.0  # seconds between lines of progress
PLACE = re.compile(r"  # .*?(\S+\.py:\d+)")
Signature = tuple[Any, ...]


def compile_functions(module: dict[str, Any], text: str, kept: Kept) -> None:
    """Replace the functions that an emitted module calls by compiled ones.

    module: names that its text made. kept: where compiled code is kept.
    """
    found = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name not in ENTRIES
    ]
    for node in found:
        end = node.body[-1]
        if isinstance(end, ast.Return):
            place = PLACE.search(ast.get_source_segment(text, node) or "")
            module[node.name] = CompiledFunction(
                module[node.name],
                ast.unparse(node),
                place[1] if place else "of no line of the model",
                not isinstance(end.value, ast.Tuple),
                kept,
            )


class CompiledFunction:
    """An emitted function that is compiled when it is called.

    plain: as it is written, which runs where Inductor refuses it. source: its text
    without comments. place: the line of the model that it begins with. single: whether
    it returns a tensor, and not several.
    """

    def __init__(
        self, plain: FunctionType, source: str, place: str, single: bool, kept: Kept
    ) -> None:
        self.plain, self.source, self.place = plain, source, place
        self.single, self.kept, self.name = single, kept, plain.__name__
        self.ready: dict[Signature, Compiled | None] = {}

    def __call__(self, *args: Any) -> Any:
        signature = _signature(args)
        if signature not in self.ready:
            self._prepare(signature, args)
        compiled = self.ready.get(signature)
        if compiled is None:
            return self.plain(*args)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if compiled.writes and _share_memory(tensors, compiled.writes):
            self.kept.refuse(
                f"{self.name} ({self.place}) writes over an argument that shares its "
                "memory with another one, and runs as it is written"
            )
            return self.plain(*args)
        found = compiled.run(*tensors)
        return found[0] if self.single else found

    def _prepare(self, signature: Signature, args: tuple[Any, ...]) -> None:
        if any(_differ(known, signature) for known in self.ready):
            self.kept.refuse(
                f"{self.name} ({self.place}) is given other shapes in each step, and "
                "runs as it is written: Inductor compiles it for one"
            )
            return
        try:
            compiled = self.kept.take(self, signature, args)
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            self.kept.refuse(
                f"Inductor refuses {self.name} ({self.place}), which runs as it is "
                f"written: {type(error).__name__}: {line}"
            )
            compiled = None
        self.ready[signature] = compiled

    def traced(
        self, args: tuple[Any, ...]
    ) -> tuple[torch.fx.GraphModule, list[Tensor], list[int]]:
        """(its ATen operations on tensors alone, what else it is given being fixed;
        tensors without data as it is given; numbers of those that it writes over)."""
        names = {**self.plain.__globals__, "kernels": for_inductor}
        plain = FunctionType(self.plain.__code__, names, self.name)

        def on_tensors(*tensors: Tensor) -> Any:
            given = iter(tensors)
            every = [next(given) if isinstance(a, Tensor) else a for a in args]
            found = plain(*every)
            return (found,) if self.single else found

        # Tensors of their own for all arguments: that some are views of one tensor in
        # the call at hand says nothing of the next.
        with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
            fakes = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in args
                if isinstance(x, Tensor)
            ]
            before = [x._version for x in fakes]
            graph = make_fx(on_tensors)(*fakes)
        known = zip(fakes, before, strict=True)
        written = [i for i, (x, version) in enumerate(known) if x._version != version]
        for node in graph.graph.nodes:
            if "val" in node.meta:  # by which Inductor finds the mode
                node.meta["example_value"] = node.meta["val"]
        return graph, fakes, written


def _signature(args: tuple[Any, ...]) -> Signature:
    """What a function is compiled for."""
    return tuple(
        [
            (a.shape, a.stride(), a.dtype, a.device)
            if isinstance(a, Tensor)
            else (type(a), a)
            for a in args
        ]
    )


def _differ(one: Signature, other: Signature) -> bool:
    """Whether an argument has two shapes; a mask may be there or not."""
    pairs = zip(one, other, strict=True)
    return any(len(a) == len(b) == 4 and a[0] != b[0] for a, b in pairs)


def _share_memory(tensors: list[Tensor], written: Sequence[int]) -> bool:
    """Whether one of those written shares memory with any other one."""
    owners = [x.untyped_storage().data_ptr() for x in tensors]
    return any(owners.count(owners[i]) > 1 for i in written)


# --- what is kept -------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What Inductor made of a function. writes: numbers of the tensors among its
    arguments that it writes over."""

    run: Callable[..., Any]
    writes: tuple[int, ...]


_in_memory: dict[str, Compiled] = {}  # of this process, by key


class Kept:
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
        LOG.warning(f"{self.who}: {line}" if self.who else line)

    def say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.say(line)

    def refuse(self, line: str) -> None:
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
        """Load what a module's functions were compiled to, see `remember`. Returns
        whether that is known."""
        folder = self._folder()
        try:
            keys = json.loads((folder / _listed(text, device)).read_text())
        except (OSError, ValueError):
            return False
        with _inductor(folder, device) as inductor:
            for key in keys:
                found = _in_memory.get(key) or self._load(inductor, folder / key)
                if found is not None:
                    _in_memory[key] = found
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
            writes = json.loads(_writes_of(path).read_text())
            with known:
                run = inductor.CompiledArtifact.load(path=str(path), format="binary")
            return Compiled(run, tuple(writes))
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
        graph, fakes, written = function.traced(args)
        made = inductor.standalone_compile(graph, fakes, dynamic_shapes="from_graph")
        _writes_of(path).write_text(json.dumps(written))
        try:
            made.save(path=str(path), format="binary")
        except Exception as error:
            self.say_once(
                f"{function.name} ({function.place}) is compiled again by each "
                f"process, as it cannot be kept: {type(error).__name__}: {error}"
            )
        return Compiled(made, tuple(written))

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
        """The directory, emptied of what other versions left there."""
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
    """What compiled code depends on, beside versions."""
    config = import_module("torch._inductor.config")
    made_of = (source, signature, _own_code(), _processor(device), config.get_hash())
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]


def _writes_of(path: Path) -> Path:
    """The file beside compiled code that says over what it writes."""
    return path.with_suffix(".writes")


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
    """Lets processes that share a directory in by turns: others find what one made."""
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
