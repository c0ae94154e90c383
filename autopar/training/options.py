"""What a run can be told, said once: fields, flags and their help."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError
from autopar.passes.ranges import RANGES, check_range
from autopar.training.evaluation import check_evaluation
from autopar.training.nonfinite import ON_NONFINITE
from autopar.training.profile import read_steps
from autopar.training.resume import check_saving
from autopar.training.schedules import DECAY, check_schedule
from autopar.training.token_files import BIN_DTYPES

HELD_OUT = 0.1  # share of the data, where some is
STEPS = 20


class OptionError(AutoparError):
    """An option of a run that is out of its range."""


def option(default: Any, help: str, **flag: Any) -> Any:
    """A field that has a flag. flag: further arguments of `add_argument`."""
    return field(default=default, metadata={"help": help, **flag})


@dataclass(frozen=True)
class RunOptions:
    """Numbers are in the range of their name, see `passes.ranges`."""

    steps: int = option(STEPS, "of the optimizer")
    epochs: int = option(
        0, "over the data, each sample once in each; in place of --steps"
    )
    data: tuple[str, ...] = option(
        ("synthetic",),
        "stdlib, synthetic, or a file or folder: .bin .npy .txt .jsonl .parquet, or of "
        "Dataset.save_to_disk; again, for a mixture: a.bin:0.7",
        metavar="PATH[:WEIGHT]",
    )
    tokenizer: Path | None = option(  # noqa: RUF009
        None, "of text: a folder, or its tokenizer.json; without, a token is a byte"
    )
    column: str | None = option(
        None, "of a dataset (default: input_ids, or text, which --tokenizer prefers)"
    )
    document_end: str | None = option(
        None,
        "token after each document (default: the tokenizer's eos_token); its id, where "
        "data are ids",
    )
    bin_dtype: str = option("uint16", "of a .bin without header", choices=BIN_DTYPES)
    token_cache: Path | None = option(  # noqa: RUF009
        None, "for tokens made of text (default: beside it)", metavar="DIR"
    )
    lr: float = option(3e-4, "learning rate, of AdamW")
    lr_schedule: str = option(
        "constant", "after the warmup; the others end at --min-lr", choices=tuple(DECAY)
    )
    warmup: int = option(0, "steps until lr is reached")
    min_lr: float = option(0.0, "that lr decays to")
    decay_ratio: float = option(0.2, "share of the steps in which wsd decays")
    beta1: float = option(0.9, "of AdamW")
    beta2: float = option(0.95, "of AdamW")
    weight_decay: float = option(0.1, "of AdamW, for parameters of 2 dims or more")
    clip: float = option(1.0, "the greatest norm of all gradients; 0: as it is")
    ema: float = option(
        0.0,
        "decay of an average of the weights, as 0.999, which is evaluated too; 0: none",
    )
    seed: int = option(0, "of the data; of a MODEL's weights and dropout, too")
    eval_every: int = option(0, "steps between evaluations; 0: none")
    eval_batches: int = option(8, "of an evaluation; 0: all that is held out")
    eval_fraction: float | None = option(
        None,
        "share of the data, its end, that is held out "
        f"(default: {HELD_OUT} with --eval-every, else 0)",
    )
    eval_data: tuple[str, ...] = option(
        (),
        "evaluate on this, in place of a share of --data; as that",
        metavar="PATH[:WEIGHT]",
    )
    log_file: Path | None = option(None, "append JSON lines", metavar="FILE")  # noqa: RUF009
    log_every: int = option(10, "steps between lines of the log")
    tensorboard: Path | None = option(None, "for its event files", metavar="DIR")  # noqa: RUF009
    wandb: str | None = option(
        None, "of Weights & Biases; WANDB_MODE=offline is heeded", metavar="PROJECT"
    )
    profile_steps: str | None = option(
        None,
        "trace steps A to B on each rank, by torch.profiler, into the folder of --save "
        "or of the plan",
        metavar="A:B",
    )
    on_nonfinite: str = option(
        "stop", "or skip, which waits for a GPU in each step", choices=ON_NONFINITE
    )
    reference: bool = option(False, "train the model itself beside, on rank 0")
    timeout: float = option(300.0, "seconds to wait for a rank")
    save: Path | None = option(None, "for checkpoints", metavar="DIR")  # noqa: RUF009
    save_every: int = option(0, "steps between checkpoints; 0: the last alone")
    keep: int = option(2, "how many of the newest checkpoints stay")
    async_save: bool = option(False, "write checkpoints while training goes on")
    resume: bool = option(False, "go on from the newest checkpoint, if any")
    sample_prompt: str | None = option(
        None, "text that the trained model goes on with at the end", metavar="TEXT"
    )
    other_data: bool = option(False, "with --resume: train on, with other data")
    unproved: bool = option(False, "run a plan that nobody proved")
    # Flags that other commands have too: what runs functions, in place of the plan's,
    # see `passes.plan.BACKENDS`; and one object a line.
    backend: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in RANGES and not (value is None is each.default):
                check_range(each.name, value, OptionError)
        check_saving(self)
        check_schedule(self)
        check_evaluation(self)
        if self.epochs and self.steps != STEPS:
            raise OptionError(
                f"--epochs {self.epochs} and --steps {self.steps} are both given",
                fix="leave one out: epochs say how many steps there are",
            )
        if self.profile_steps is not None and not self.epochs:
            read_steps(self.profile_steps, self.steps)

    @property
    def held_out(self) -> float:
        """The share of the data that training never sees."""
        if self.eval_fraction is None:
            return HELD_OUT if self.eval_every and not self.eval_data else 0.0
        return self.eval_fraction

    @property
    def to_evaluate(self) -> RunOptions:
        """The options for --eval-data, as if it were the data."""
        return replace(
            self, data=self.eval_data, eval_data=(), epochs=0, profile_steps=None
        )

    def of_steps(self, steps: int) -> RunOptions:
        """The same run, its epochs counted in steps."""
        return replace(self, epochs=0, steps=steps)
