"""Rows of a run for TensorBoard and for Weights & Biases."""

from __future__ import annotations

import importlib
import math
import secrets
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError
from autopar.training.options import RunOptions
from autopar.training.reports.metrics import Clock, Row

RUN_ID = ".wandb-id"  # in the folder of checkpoints: a run that goes on is the same one


class TrackerError(AutoparError):
    """A tracker that is not installed, or cannot be reached."""


class Tracker:
    """Takes rows at intervals of steps, and those of evaluations."""

    def __init__(self, options: RunOptions, done: int) -> None:
        self.options, self.clock = options, Clock(done)

    def wants(self, done: int) -> bool:
        return done % self.options.log_every == 0 or done == self.options.steps


class TensorBoard(Tracker):
    """Event files in the folder of `--tensorboard`."""

    def open(self) -> None:
        """Raises: TrackerError, OSError."""
        _need("tensorboard", "--tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        self.events = module.SummaryWriter(str(self.options.tensorboard))

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                self.events.add_scalar(name, value, int(row["step"]))
        self.events.flush()

    def close(self) -> None:
        self.events.close()


class WandB(Tracker):
    """A run of the project of `--wandb`; WANDB_MODE=offline keeps it on disk."""

    def open(self) -> None:
        """Raises: TrackerError, OSError."""
        wandb = _need("wandb", "--wandb")
        known: dict[str, Any] = {}
        if self.options.save is not None:
            known = {"id": _run_id(self.options.save), "resume": "allow"}
        plain = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(self.options).items()
        }
        try:
            self.run = wandb.init(project=self.options.wandb, config=plain, **known)
        except Exception as error:  # of many kinds
            raise TrackerError(
                f"Weights & Biases does not begin: {str(error).splitlines()[0]}",
                fix="wandb login; or keep it on disk: WANDB_MODE=offline",
            ) from error

    def write(self, row: Row) -> None:
        finite = {k: v for k, v in row.items() if math.isfinite(v) and k != "step"}
        self.run.log(finite, step=int(row["step"]))

    def close(self) -> None:
        self.run.finish()


def _need(package: str, flag: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise TrackerError(
            f"{flag} needs the package {package}", fix="pip install 'autopar[log]'"
        ) from None


def _run_id(folder: Path) -> str:
    """The name of the run whose checkpoints are there; a new one, if none has one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RUN_ID
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text().strip()
