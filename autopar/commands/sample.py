"""`autopar sample`: what a checkpoint's model goes on with."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.commands.arguments import MODEL, add_json, add_switch, number, path, text
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
    add.add_argument("--prompt", type=prompt, required=True, help="text to go on with")
    usual = Sampling()
    for name, told in (
        ("tokens", "to write"),
        ("temperature", "that logits are divided by; 0: the likeliest token each time"),
        ("top_k", "of the likeliest so many tokens; 0: of all"),
        ("seed", "of what is drawn"),
    ):
        flag = f"--{name.replace('_', '-')}"
        default = getattr(usual, name)
        add.add_argument(flag, type=number(name), default=default, help=told)
    add.add_argument(
        "--model", type=text, help=f"if it is not where the run had it: {MODEL}"
    )
    add_switch(add, "--ema", "the averages of weights that --ema made")
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
