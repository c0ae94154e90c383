"""`autopar sample`: what a checkpoint's model goes on with."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.commands.arguments import (
    EMA,
    MODEL,
    add_json,
    add_seed,
    add_switch,
    number,
    path,
    text,
)
from autopar.passes.ranges import shown
from autopar.progress import Progress
from autopar.runtime.launch.join import default_device
from autopar.training.sample import Sampling, sample_checkpoint

EXAMPLES = (
    "autopar sample trained --prompt 'def main():'",
    "autopar sample trained --prompt 'Once' --tokens 50 --temperature 0",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=sample_command)
    add.add_argument("checkpoint", type=path, help="one, or a directory: the newest")
    add.add_argument("--prompt", type=prompt, required=True, help="text to continue")
    usual = Sampling()
    add_seed(add, "the tokens that are drawn")
    for name, told in (
        ("tokens", "number of tokens to write"),
        ("temperature", "divides the logits; 0: always the likeliest token"),
        ("top_k", "draw only from so many of the likeliest tokens; 0: from all"),
    ):
        flag = f"--{name.replace('_', '-')}"
        default = getattr(usual, name)
        add.add_argument(flag, type=number(name), default=default, help=told)
    add.add_argument("--model", type=text, help=f"{MODEL} (default: the run's)")
    add_switch(add, "--ema", EMA)
    add_json(add, "print the prompt and the text as JSON")


def prompt(written: str) -> str:
    """Text, of several lines maybe."""
    try:
        written.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"{shown(written)} is not text: give characters, as UTF-8"
        ) from None
    return written


def sample_command(arguments: argparse.Namespace) -> int:
    """Prints text sampled from a checkpoint's model."""
    sampling = Sampling(
        arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed
    )
    with Progress("sample"):
        written = sample_checkpoint(
            arguments.checkpoint,
            arguments.prompt,
            sampling,
            arguments.model,
            default_device(),
            arguments.ema,
        )
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": written}, indent=1))
    else:
        print(written)
    return 0
