"""The options of a run, declared once: fields, flags and their help."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError
from autopar.passes.ranges import RANGES, check_range
from autopar.training.data.token_files import BIN_DTYPES
from autopar.training.nonfinite import ON_NONFINITE
from autopar.training.schedules import DECAY

HELD_OUT = 0.1  # share of the data, where some is
STEPS = 20


class OptionError(AutoparError):
    """Options of a run that are out of range, or contradict each other."""


def option(default: Any, help: str, **flag: Any) -> Any:
    """A field that has a flag. flag: further arguments of `add_argument`."""
    return field(default=default, metadata={"help": help, **flag})


@dataclass(frozen=True)
class RunOptions:
    """Numbers are in the range of their name, see `passes.ranges`."""

    steps: int = option(STEPS, "steps of the optimizer")
    epochs: int = option(
        0, "passes over the data, each sample once in each; in place of --steps"
    )
    data: tuple[str, ...] = option(
        ("synthetic",),
        "stdlib, synthetic, or a file or folder: .bin .npy .txt .jsonl .parquet, or of "
        "Dataset.save_to_disk; repeated, with weights, for a mixture: a.bin:0.7",
        metavar="PATH[:WEIGHT]",
    )
    tokenizer: Path | None = option(  # noqa: RUF009
        None, "folder of a tokenizer, or its tokenizer.json (default: bytes are tokens)"
    )
    column: str | None = option(
        None,
        "column of a dataset (default: input_ids, else text; --tokenizer prefers text)",
    )
    document_end: str | None = option(
        None,
        "token after each document, or its id if data are ids (default: the "
        "tokenizer's eos_token)",
    )
    bin_dtype: str = option(
        "uint16", "dtype of a .bin file without header", choices=BIN_DTYPES
    )
    token_cache: Path | None = option(  # noqa: RUF009
        None, "folder for the tokens of text (default: beside it)", metavar="DIR"
    )
    lr: float = option(3e-4, "learning rate of AdamW")
    lr_schedule: str = option(
        "constant",
        "lr after the warmup; all but constant end at --min-lr",
        choices=tuple(DECAY),
    )
    warmup: int = option(0, "steps in which lr rises to --lr")
    min_lr: float = option(0.0, "lr at the end of its decay")
    decay_ratio: float = option(0.2, "share of the steps in which wsd decays")
    beta1: float = option(0.9, "beta1 of AdamW")
    beta2: float = option(0.95, "beta2 of AdamW")
    weight_decay: float = option(0.1, "weight decay of parameters of 2 dims or more")
    clip: float = option(1.0, "largest norm of all gradients; 0: no clipping")
    ema: float = option(
        0.0, "decay of an average of weights, as 0.999, which is evaluated too; 0: none"
    )
    seed: int = option(0, "seed of the data; of a MODEL's weights and dropout too")
    eval_every: int = option(0, "steps between evaluations; 0: no evaluations")
    eval_batches: int = option(8, "batches of an evaluation; 0: all that is held out")
    eval_fraction: float | None = option(
        None,
        "share of the data, its end, that is held out "
        f"(default: {HELD_OUT} with --eval-every, else 0)",
    )
    eval_data: tuple[str, ...] = option(
        (),
        "data to evaluate on, named as --data, in place of a share of it",
        metavar="PATH[:WEIGHT]",
    )
    log_file: Path | None = option(  # noqa: RUF009
        None, "file to append JSON lines to", metavar="FILE"
    )
    log_every: int = option(10, "steps between lines of the log")
    tensorboard: Path | None = option(None, "folder for event files", metavar="DIR")  # noqa: RUF009
    wandb: str | None = option(
        None, "project of Weights & Biases; heeds WANDB_MODE=offline", metavar="PROJECT"
    )
    profile_steps: str | None = option(
        None,
        "trace steps A to B on each rank with torch.profiler, into the folder of "
        "--save or of the plan",
        metavar="A:B",
    )
    on_nonfinite: str = option(
        "stop",
        "stop at a loss or gradient that is not finite; or skip its update, for which "
        "each step waits for the GPU",
        choices=ON_NONFINITE,
    )
    reference: bool = option(False, "also train the model itself, on rank 0")
    timeout: float = option(300.0, "seconds to wait for a rank")
    save: Path | None = option(None, "folder for checkpoints", metavar="DIR")  # noqa: RUF009
    save_every: int = option(0, "steps between checkpoints; 0: only the last")
    keep: int = option(2, "number of newest checkpoints that are kept")
    async_save: bool = option(False, "write checkpoints while training goes on")
    resume: bool = option(False, "continue from the newest checkpoint, if any")
    sample_prompt: str | None = option(
        None, "text that the trained model continues at the end", metavar="TEXT"
    )
    other_data: bool = option(False, "with --resume: continue with other data")
    unproved: bool = option(
        False, "do without a proof that the plan computes what the model does"
    )
    # Flags that other commands have too: what runs functions, in place of the plan's,
    # see `passes.plan.BACKENDS`; and one object a line.
    backend: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in RANGES and not (value is None is each.default):
                check_range(each.name, value, OptionError)
        self._check_saving()
        self._check_schedule()
        self._check_evaluation()
        if self.epochs and self.steps != STEPS:
            raise OptionError(
                f"--epochs {self.epochs} and --steps {self.steps} are both given",
                fix="leave one out: epochs say how many steps there are",
            )
        if self.profile_steps is not None and not self.epochs:
            self._check_profiled()

    def _check_saving(self) -> None:
        if self.save is None and (self.resume or self.save_every):
            name = "--resume" if self.resume else "--save-every"
            raise OptionError(f"{name} needs a directory", fix="add --save DIRECTORY")
        if self.save is None and self.async_save:
            raise OptionError(
                "--async-save needs a directory", fix="add --save DIRECTORY"
            )
        if self.resume and self.reference:
            raise OptionError(
                "--reference has no checkpoint to go on from",
                fix="leave out --resume, or --reference",
            )

    def _check_schedule(self) -> None:
        name, steps, warmup = self.lr_schedule, self.steps, self.warmup
        if name not in DECAY:
            fix = f"use one of {', '.join(DECAY)}"
            raise OptionError(f"lr_schedule={name!r}", fix=fix)
        if name == "constant":
            if self.min_lr:
                raise OptionError(
                    f"--min-lr {self.min_lr:g} is never reached: the rate is constant",
                    fix="add --lr-schedule cosine, linear or wsd, or leave "
                    "--min-lr out",
                )
            return
        if self.min_lr > self.lr:
            raise OptionError(
                f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}",
                fix=f"use --min-lr {self.lr / 10:g}",
            )
        decaying = max(1, self.decay_steps)
        if warmup + decaying > steps:
            raise OptionError(
                f"--lr-schedule {name}: {warmup} steps of warmup and {decaying} that "
                f"decay are more than {steps} steps",
                fix=f"use --warmup {steps - decaying}, or more --steps",
            )

    def _check_evaluation(self) -> None:
        if self.eval_data and not self.eval_every:
            raise OptionError(
                "--eval-data is there, but nobody says when to evaluate",
                fix="add --eval-every 100, or leave --eval-data out",
            )
        if self.eval_data and self.eval_fraction:
            raise OptionError(
                "--eval-data and --eval-fraction both say what to evaluate on",
                fix="leave one of them out",
            )
        if self.eval_every and not (self.held_out or self.eval_data):
            raise OptionError(
                "--eval-every has nothing to evaluate on: --eval-fraction is 0",
                fix="use --eval-fraction 0.1, or leave --eval-every out",
            )

    def _check_profiled(self) -> None:
        if not self.profiled_steps:
            raise OptionError(
                f"--profile-steps {self.profile_steps} are no steps of a run of "
                f"{self.steps}",
                fix=f"write A:B, from 1 to {self.steps}, as 3:5, which profiles three",
            )

    @property
    def profiled_steps(self) -> range:
        """The steps of `A:B`, both included; none, where the run has no such steps."""
        ends = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile_steps or "")
        first, last = (int(ends[1]), int(ends[2])) if ends else (0, 0)
        return range(first, last + 1) if 1 <= first <= last <= self.steps else range(0)

    @property
    def decay_steps(self) -> int:
        """The last steps of a run, in which the learning rate decays."""
        if self.lr_schedule == "constant":
            return 0
        if self.lr_schedule == "wsd":
            return max(1, round(self.decay_ratio * self.steps))
        return max(0, self.steps - self.warmup)

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
