"""Text that a trained model goes on with: the untouched model, on one device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.checkpoints import checkpoint_files as files
from autopar.checkpoints.checkpoint import EXTRA
from autopar.checkpoints.dcp import CheckpointError, read_alone
from autopar.checkpoints.export import model_tensors
from autopar.models.load import LoadedModel, load_model
from autopar.passes.errors import AutoparError
from autopar.passes.ranges import check_range
from autopar.plans.store import StoredPlan
from autopar.progress import tell
from autopar.training.data.detokenize import Text, open_text
from autopar.training.data.feed import vocab_of
from autopar.training.data.fields import LABELS, fields_of
from autopar.training.options import RunOptions


class SampleError(AutoparError):
    """A model that nothing can be sampled from, or options that cannot be."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. tokens: how many. temperature: logits are divided by it; 0:
    the likeliest token each time. top_k: of the likeliest so many; 0: of all."""

    tokens: int = 100
    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            check_range(each.name, getattr(self, each.name), SampleError)


@dataclass(frozen=True)
class Origin:
    """The origin of a run, as its checkpoints keep it. inputs: fields of a batch, with
    their shapes [batch, seq] and dtypes. vocab: ids that the model has. tokenizer: ""
    for bytes. folder: that the run was started in."""

    model: str
    seed: int
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    vocab: int
    tokenizer: str
    folder: str = ""

    @classmethod
    def of(cls, stored: StoredPlan, loaded: LoadedModel, options: RunOptions) -> Origin:
        program, tokenizer = stored.program, str(options.tokenizer or "")
        vocab = loaded.vocab or vocab_of(program)
        own = stored.model_spec, stored.seed, program.inputs, vocab, tokenizer
        return cls(*own, str(Path.cwd()))

    def to_data(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        shapes = {n: [list(shape), kind] for n, (shape, kind) in self.inputs.items()}
        plain = {"model": self.model, "seed": self.seed, "inputs": shapes}
        plain |= {"vocab": self.vocab, "tokenizer": self.tokenizer}
        return {**plain, "folder": self.folder}

    @classmethod
    def read(cls, checkpoint: Path) -> Origin:
        """Reads what a checkpoint was trained from. Raises: CheckpointError."""
        extra = read_alone(checkpoint, {EXTRA: b""}).get(EXTRA)
        data = extra.get("origin") if isinstance(extra, dict) else None
        if not isinstance(data, dict):
            raise CheckpointError(
                f"'{checkpoint}' does not say what model it is of: it is not one of "
                "`autopar run`, or of an earlier version",
                fix="load what autopar export writes of it, in Python",
            )
        inputs = {
            n: (tuple(shape), kind) for n, (shape, kind) in data["inputs"].items()
        }
        return cls(**{**data, "inputs": inputs}).from_here()

    def from_here(self) -> Origin:
        """The same with files where the run found them, if they are not here."""

        def resolved(name: str) -> str:
            there = Path(self.folder) / name
            return name if Path(name).exists() or not there.exists() else str(there)

        if self.model.startswith("hf:"):
            model = f"hf:{resolved(self.model.removeprefix('hf:'))}"
        else:
            file, colon, factory = self.model.rpartition(":")
            model = f"{resolved(file)}{colon}{factory}"
        tokenizer = self.tokenizer and resolved(self.tokenizer)
        return replace(self, model=model, tokenizer=tokenizer)


def sample_checkpoint(
    directory: str | Path,
    prompt: str,
    sampling: Sampling,
    model: str | None = None,
    device: torch.device | str = "cpu",
    averages: bool = False,
) -> str:
    """Returns the prompt, continued by the newest checkpoint's model.

    model: its present place, as `load_model` takes it, if it moved. averages: sample
    from the averages of weights. Raises: CheckpointError, ModelError, SampleError.
    """
    folder = files.find(directory)
    manifest = files.read_manifest(folder)
    files.check_files(folder, manifest, manifest.files)
    origin = Origin.read(folder)
    loaded = load_model(model or origin.model, seed=origin.seed, device="meta")
    tensors = model_tensors(folder, manifest.aliases, averages)
    tensors |= {alias: tensors[name] for alias, name in manifest.aliases.items()}
    return sample_text(loaded, tensors, origin, prompt, sampling, device)


def sample_text(
    loaded: LoadedModel,
    state: Mapping[str, Tensor],
    origin: Origin,
    prompt: str,
    sampling: Sampling,
    device: torch.device | str = "cpu",
) -> str:
    """The same with a model, which takes these weights. state: its state dict."""
    text = open_text(origin.tokenizer)
    ids = text.encode(prompt)
    if not ids:
        raise SampleError("the prompt is empty", fix="give some text: --prompt 'def '")
    if max(ids) >= origin.vocab:
        raise SampleError(
            f"the prompt has token {max(ids)}, but the model's vocabulary is "
            f"0..{origin.vocab - 1}",
            fix="give text of tokens that it was trained with",
        )
    loaded.model.load_state_dict(dict(state), assign=True)
    model = loaded.model.to(device).eval()
    drawn = generate(model, origin, ids, sampling, text)
    return text.decode([*ids, *drawn])


@torch.no_grad()
def generate(
    model: nn.Module,
    origin: Origin,
    prompt: Iterable[int],
    sampling: Sampling,
    text: Text,
) -> list[int]:
    """Returns the tokens that follow. The model sees the last ones alone, as many as a
    sequence had in training, as one document."""
    [seq] = {shape[1] for shape, _ in origin.inputs.values()}
    draw = torch.Generator().manual_seed(sampling.seed)
    ids, began = list(prompt), len(list(prompt))
    for made in range(sampling.tokens):
        tell("writing tokens", made, sampling.tokens)
        seen = torch.tensor([ids[-seq:]])
        logits = logits_of(model, origin, seen)[0, -1, : text.size].float().cpu()
        ids.append(_draw(logits, sampling, draw))
    return ids[began:]


def logits_of(model: nn.Module, origin: Origin, ids: Tensor) -> Tensor:
    """Returns logits [1, seq, vocab] of what the model returns. ids: int64 [1, seq].

    Labels are left out where forward has a default for them.
    Raises: SampleError.
    """
    takes = inspect.signature(model.forward).parameters.values()
    required = {p.name for p in takes if p.default is inspect.Parameter.empty}
    made = fields_of(origin.inputs, ids, ids, None)
    device = next(model.parameters()).device
    batch = {
        name: x.to(device)
        for name, x in made.items()
        if name not in LABELS or name in required
    }
    output = model(**batch)
    held = output
    if hasattr(output, "logits"):
        held = [output.logits]
    elif isinstance(output, Mapping):
        held = output.values()
    tensors = [output] if isinstance(output, Tensor) else [*held]
    for x in tensors:
        if isinstance(x, Tensor) and x.ndim == 3 and len(x) == 1:
            return x
    raise SampleError(
        f"{type(model).__name__} returns no logits [batch, seq, vocab]",
        fix="let forward return them beside the loss, as (logits, loss)",
    )


def _draw(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """One token. logits: float32 [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    chances = (logits / sampling.temperature).softmax(0)
    return int(torch.multinomial(chances, 1, generator=draw))
