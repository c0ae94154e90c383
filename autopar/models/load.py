"""Models by name: `file.py:factory`, `module:factory`, or `hf:` and a configuration.

    gpt.py:demo                                    a function that makes the model
    hf:gpt2                                        Hugging Face, with its defaults
    hf:llama?num_hidden_layers=4,hidden_size=256   and with some of them changed
    hf:llama?packed=true                           that keeps packed documents apart
    hf:path/config.json                            a configuration file
    hf:meta-llama/Llama-3.1-70B                    one that comes with autopar, or that
                                                   the hub's cache has

Nothing is downloaded: weights are random, drawn from the seed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.gc_paused import gc_paused
from autopar.models.configurations import find_configuration
from autopar.models.factories import (
    ModelError,
    check_takes_nothing,
    find_factory,
    near,
    their_errors,
)
from autopar.models.meta import parameters_on_meta
from autopar.passes.decode import parse_json
from autopar.passes.ranges import Range, shown
from autopar.progress import tell
from autopar.read_file import read_text

BIG = 2 << 30  # bytes of parameters from which on they stay on the meta device
TOKENS = Range(1, 1 << 26)  # of a made-up batch: half a GiB for each of its fields
# Of configurations: layers are made one by one, tokens drawn from the vocabulary.
CONFIGURED = {"num_hidden_layers": Range(0, 10_000), "vocab_size": Range(1, 1 << 30)}
RETURNS = "return the model, or (model, batch): the batch a dict, from the names of "
RETURNS += "what forward takes to tensors"
POSITIONS = "position_ids"
IGNORED = -100  # the label that a loss leaves out

# Chosen by the builder of the model, not stored in its configuration.
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


@dataclass(frozen=True)
class LoadedModel:
    """model: in training mode. batch: what its factory gave along. spec: its name.

    vocab: its number of tokens, where its configuration says so. shifts_labels: it
    compares labels[i] with what it predicts at i - 1, as Hugging Face models do.
    packed: it takes `position_ids` that begin anew with each document, and keeps these
    apart.
    """

    model: nn.Module
    batch: Mapping[str, Tensor] | None
    spec: str
    vocab: int | None = None
    shifts_labels: bool = False
    packed: bool = False

    @property
    def on_meta(self) -> bool:
        return any(p.is_meta for p in self.model.parameters())


def load_model(spec: str, *, seed: int = 0, device: str | None = None) -> LoadedModel:
    """Make the model that `spec` names.

    device: "cpu": real weights; "meta": parameters without memory, so that a model far
    bigger than this machine compiles; None: meta for Hugging Face models above 2 GiB.
    Raises: ModelError.
    """
    if device not in (None, "cpu", "meta"):
        raise ModelError(f"a model is made on cpu or meta, not on '{device}'")
    tell(f"making {spec}")
    if spec.startswith("hf:"):
        return _hugging_face(spec, seed, device)
    factory = find_factory(spec)
    torch.manual_seed(seed)
    check_takes_nothing(spec, factory)
    with their_errors(spec):
        if device == "meta":
            with parameters_on_meta() as finish:
                made = factory()
                finish(made[0] if isinstance(made, tuple) else made)
        else:
            made = factory()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(batch, Mapping | None):
        raise ModelError(f"'{spec}' returned {_kind(made)}", fix=RETURNS)
    if batch is not None and not all(isinstance(name, str) for name in batch):
        raise ModelError(f"the batch of '{spec}' has fields without names", fix=RETURNS)
    if batch is not None and not any(isinstance(x, Tensor) for x in batch.values()):
        raise ModelError(f"the batch of '{spec}' holds no tensor", fix=RETURNS)
    return LoadedModel(model, batch, spec)


def _kind(made: Any) -> str:
    """Describes the result of a factory."""
    if isinstance(made, tuple):
        return f"({', '.join(type(x).__name__ for x in made)})"
    return f"the class {made.__name__}" if isinstance(made, type) else repr(type(made))


def example_batch(
    vocab: int,
    batch: int,
    seq: int,
    attention_mask: bool = False,
    packed: bool = False,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Random tokens, int64 [batch, seq], as Hugging Face's causal models take them.

    The first labels of every third sample are to be ignored. packed: with positions of
    two documents in each sample. device: see `random_batch`.
    """
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        name: ((batch, seq), "int64") for name in ("input_ids", "labels")
    }
    if attention_mask:
        shapes["attention_mask"] = ((batch, seq), "int64")
    if packed:
        shapes[POSITIONS] = ((batch, seq), "int64")
    return random_batch(shapes, vocab, device=device)


def random_batch(
    inputs: Mapping[str, tuple[tuple[int, ...], str]],
    vocab: int,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """A batch of the compiled shapes: random tokens, some labels to be ignored.

    inputs: field -> (shape, dtype), as in `Program.inputs`. An attention mask is all
    ones, and positions begin anew after a third of the sequence. device: "cpu", or
    "meta" for shapes alone. Raises ModelError for a field that is not integers
    [batch, seq].
    """
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for name, (shape, dtype) in inputs.items():
        if prod(shape) not in TOKENS:
            raise ModelError(
                f"cannot make up {' x '.join(map(str, shape))} tokens for '{name}'",
                fix=f"take fewer samples, or shorter ones: {TOKENS} in all",
            )
        if len(shape) != 2 or not dtype.startswith("int"):
            raise ModelError(
                f"cannot make up '{name}', {dtype}{list(shape)}: it is not tokens",
                fix="let the model's factory return (model, batch)",
            )
        kind = getattr(torch, dtype)
        if device == "meta":
            made[name] = torch.empty(shape, dtype=kind, device=device)
            continue
        if name == "attention_mask":
            made[name] = torch.ones(shape, dtype=kind)
            continue
        if name == POSITIONS:
            first = shape[1] // 3
            places = torch.cat([torch.arange(first), torch.arange(shape[1] - first)])
            made[name] = places.to(kind).repeat(shape[0], 1)
            continue
        made[name] = torch.randint(vocab, shape, generator=draw, dtype=kind)
        if name == "labels":
            made[name][::3, : shape[1] // 4] = IGNORED
    return made


# --- Hugging Face ----------------------------------------------------------------


@gc_paused()
def _hugging_face(spec: str, seed: int, device: str | None) -> LoadedModel:
    transformers = _transformers()
    config, implementations, packed = _read_config(transformers, spec)
    auto = transformers.AutoModelForCausalLM

    def build() -> nn.Module:
        torch.manual_seed(seed)
        with _configured(spec):
            model = auto.from_config(config, dtype=config.dtype, **implementations)
            return model.train()

    if device != "cpu":
        with parameters_on_meta() as finish:
            model = build()
            finish(model)
        big = sum(p.numel() * p.element_size() for p in model.parameters()) >= BIG
    if device == "cpu" or (device is None and not big):
        model = build()
    if packed and POSITIONS not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"'{spec}' takes no {POSITIONS}, by which documents are told apart",
            fix="leave out packed=true, or take llama, mistral, qwen3 or the like",
        )
    return LoadedModel(model, None, spec, config.vocab_size, True, packed)


@contextlib.contextmanager
def _configured(spec: str) -> Iterator[None]:
    """Reraises errors of transformers about a configuration's values, in one line."""
    try:
        yield
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise ModelError(
                f"'{spec}' is not a causal language model in transformers",
                fix="use a type such as gpt2, gpt_neox, llama, mistral or qwen3",
            ) from None
        raise ModelError(
            f"transformers cannot make '{spec}': {type(error).__name__}: {error}",
            fix="give the configuration other values",
        ) from error


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ModelError(
            "models that start with hf: need the package transformers",
            fix="pip install 'autopar[hf]'",
        ) from None
    # Its warnings are about token ids of weights that are not loaded here.
    transformers.logging.set_verbosity_error()
    return transformers


def _read_config(transformers: Any, spec: str) -> tuple[Any, dict[str, str], bool]:
    """The configuration, the implementations chosen beside it, and whether documents
    are packed."""
    name, _, query = spec.removeprefix("hf:").partition("?")
    overrides = _read_query(spec, query)
    chosen = {k: str(overrides.pop(k)) for k in IMPLEMENTATIONS if k in overrides}
    packed = overrides.pop("packed", False)
    if not isinstance(packed, bool):
        raise ModelError(f"'{spec}' has packed={packed}", fix="write packed=true")
    kinds = transformers.CONFIG_MAPPING
    file = find_configuration(name, [*kinds])
    data: dict[str, Any] = {}
    if file is not None:
        data = _read_json(file)
        name = data.pop("model_type")
        if name not in kinds:
            raise ModelError(
                f"transformers knows no model type '{name}' of '{file}'",
                fix=near(name, [*kinds]),
            )
    plain = kinds[name]()
    known = {*plain.to_dict(), *plain.attribute_map}
    for key in overrides:
        if key not in known:
            raise ModelError(
                f"the configuration of {name} has no '{key}'",
                fix=near(key, sorted(known)),
            )
    with _configured(spec):
        config = transformers.AutoConfig.for_model(name, **{**data, **overrides})
    for key, allowed in CONFIGURED.items():
        if (
            getattr(config, key, None) is not None
            and getattr(config, key) not in allowed
        ):
            raise ModelError(
                f"'{spec}' has {key}={shown(getattr(config, key))}",
                fix=f"use {allowed}",
            )
    # The default one loops over experts that tokens chose: no fixed graph. A model
    # without experts does not mind.
    chosen.setdefault("experts_implementation", "batched_mm")
    if packed:  # with a cache nobody looks at positions for documents
        config.use_cache = False
    return config, chosen, packed


def _read_query(spec: str, query: str) -> dict[str, Any]:
    """`a=1,b=x` -> {"a": 1, "b": "x"}; `&` separates too."""
    values: dict[str, Any] = {}
    for piece in query.replace("&", ",").split(",") if query else ():
        key, equals, text = (part.strip() for part in piece.partition("="))
        if not (key and equals and text):
            raise ModelError(
                f"'{piece}' in '{spec}' is not key=value",
                fix="write hf:llama?num_hidden_layers=4,hidden_size=256",
            )
        words = {"true": True, "false": False, "none": None}
        if text.lower() in words:
            values[key] = words[text.lower()]
            continue
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[key] = text
    return values


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(
            f"there is no configuration '{file}' (looked in {Path.cwd()})",
            fix="give the path of a config.json",
        )
    fix = "give a config.json as transformers writes it"
    data = parse_json(read_text(file, ModelError, fix), f"'{file}'", ModelError, fix)
    if not isinstance(data, dict) or "model_type" not in data:
        raise ModelError(
            f"'{file}' has no model_type", fix='add for instance "model_type": "gpt2"'
        )
    return data
