"""`autopar verify`: prove a plan against its model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from autopar.commands.arguments import add_backend, add_json, add_switch, path
from autopar.commands.stored import load_stored
from autopar.compiler import compile_offline, proved
from autopar.machine.backend import resolve_backend
from autopar.machine.machine import host_memory
from autopar.machine.profile_file import read_profile
from autopar.models.batches import with_samples
from autopar.models.load import load_model, random_batch
from autopar.passes.proof_record import Proof
from autopar.plans.store import COMPILED
from autopar.progress import Progress
from autopar.proof.verification import Verification
from autopar.reports.proof import verification_data, verification_table
from autopar.runtime.agreement.validate import check_model
from autopar.runtime.execute.code_cache import CodeCache
from autopar.training.data.feed import vocab_of
from autopar.verify import room_needed, verify

EXAMPLES = ("autopar verify plan", "autopar verify plan --float64 --all")


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=verify_command)
    add.add_argument("plan", type=path, help="a directory, planned or compiled")
    add_switch(add, "--float64", "compile the plan again in double precision")
    add_switch(
        add, "--as-given", "use the model's own weights and batch (default: drawn ones)"
    )
    add_backend(add)
    add_switch(add, "--all", "one row for each parameter")
    add_json(add)


def verify_command(arguments: argparse.Namespace) -> int:
    """Proves a plan against the untouched model; status 1 if it differs."""
    with Progress("verify"):
        result = _verify(arguments)
    if isinstance(result, Proof):
        print(json.dumps(result.to_data(), indent=1) if arguments.json else result)
        return 0
    if arguments.json:
        print(json.dumps(verification_data(result), indent=1))
    else:
        print(verification_table(result, arguments.all))
    return 0 if result.passed else 1


def _verify(arguments: argparse.Namespace) -> Verification | Proof:
    """Verifies a plan beside the model itself; makes a small proof, where the model
    does not fit here."""
    stored = load_stored(arguments.plan)
    loaded = load_model(stored.model_spec, seed=stored.seed)
    program, model = stored.program, loaded.model
    check_model(program, model)
    vocab = loaded.vocab or vocab_of(program)
    if loaded.batch is not None:
        batch: Mapping = with_samples(loaded.batch, program.batch_extent)
    else:
        batch = random_batch(program.inputs, vocab, stored.seed)
    if loaded.on_meta or room_needed(program) > host_memory():
        proof = proved(program, model, batch).proof
        assert proof is not None, "what is not proved is an error"
        return proof
    if arguments.float64:
        if program.plan.dtype:
            print(
                f"note: autocast leaves float64 alone, and so does precision "
                f"'{program.plan.precision}': this proves the plan, not its casts",
                file=sys.stderr,
            )
        model = model.double()
        program = compile_offline(model, batch, program.plan)
    drawn = not arguments.as_given
    asked = arguments.backend or program.plan.backend
    measured = read_profile().backends
    backend, note = resolve_backend(asked, torch.device("cpu"), measured)
    if note:
        print(f"note: {note}", file=sys.stderr)
    cache = CodeCache(stored.directory / COMPILED) if backend == "inductor" else None
    return verify(
        *(program, model, batch), seed=stored.seed, drawn=drawn, compiled=cache
    )
