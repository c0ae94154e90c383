"""Hugging Face's Trainer trains a compiled model as it trains the model itself."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks

pytest.importorskip("accelerate", reason="needs autopar[trainer]")

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}


def parts() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    ids = torch.randint(64, (48, 16))
    labels = torch.where(torch.rand(48, 16) < 0.2, -100, ids)
    return model, [
        dict(input_ids=i, labels=x) for i, x in zip(ids, labels, strict=True)
    ]


def arguments(folder: str, batch: int, **given: Any) -> Any:
    from transformers import TrainingArguments

    usual = {"max_steps": 20, "logging_steps": 1, "save_steps": 8, "eval_steps": 10}
    usual |= {"eval_strategy": "steps", "learning_rate": 1e-2, "warmup_steps": 3}
    usual |= {"weight_decay": 0.1, "max_grad_norm": 0.5, "use_cpu": True}
    usual |= {"report_to": "none", "disable_tqdm": True}
    usual |= {"per_device_eval_batch_size": 4, "per_device_train_batch_size": batch}
    return TrainingArguments(folder, **{**usual, **given})


def curve(trainer: Any) -> list[dict[str, float]]:
    """What is logged at each step and evaluation, but for times."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_hits")
    rows = [{k: r[k] for k in kept if k in r} for r in trainer.state.log_history]
    return [row for row in rows if len(row) > 1]


def hits(found: Any) -> dict[str, float]:
    guessed = found.predictions[:, :-1].argmax(-1)
    return {"hits": float((guessed == found.label_ids[:, 1:]).mean())}


def of_one_device(folder: str) -> list[dict[str, float]]:
    """By transformers alone: 8 samples a step."""
    import transformers

    model, data = parts()
    trainer = transformers.Trainer(
        model,
        arguments(folder, 8),
        train_dataset=data[:40],
        eval_dataset=data[40:47],
        compute_metrics=hits,
    )
    trainer.train()
    return curve(trainer)


def as_torchrun_starts_it() -> None:
    """What accelerate and transformers read of this process."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def on_a_rank(
    folder: str, first: str, second: str
) -> tuple[list[Any], list[Any], bool]:
    """Curves of 20 steps, and of the last 4 once more from a checkpoint, under another
    mesh; whether what was saved is what was trained."""
    from transformers import LlamaForCausalLM

    as_torchrun_starts_it()
    warnings.simplefilter("default")
    from autopar.training.trainer import Trainer

    curves = []
    for mesh, again in ((first, None), (second, f"{folder}/checkpoint-16")):
        model, data = parts()
        parallel = {"mesh": mesh, "zero": int("dp" in mesh)}
        parallel |= {"microbatches": 2 if "pp" in mesh else 1}
        trainer = Trainer(
            model,
            arguments(folder, 4 if "dp" in mesh else 8),
            train_dataset=data[:40],
            eval_dataset=data[40:47],
            compute_metrics=hits,
            parallel=parallel,
        )
        trainer.train(resume_from_checkpoint=again)
        curves.append(curve(trainer))
    trainer.save_model()
    state = trainer.step.state_dict()
    saved = LlamaForCausalLM.from_pretrained(folder).state_dict()
    same = all(torch.equal(state[name], saved[name]) for name in state)
    return curves[0], curves[1], same


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("dp=2", "dp=2", marks=pytest.mark.slow),
        pytest.param("tp=2", "dp=2", marks=pytest.mark.nightly),
        pytest.param("pp=2", "tp=2", marks=pytest.mark.nightly),
        pytest.param("dp=2", "pp=2", marks=pytest.mark.nightly),
    ],
)
def test_losses_norms_and_metrics_are_those_of_one_device(
    first: str, second: str, tmp_path: Path
) -> None:
    [expected] = run_ranks(of_one_device, 1, str(tmp_path / "one"))
    ranks = run_ranks(on_a_rank, 2, str(tmp_path / "two"), first, second)
    for found, resumed, same in ranks:
        assert same and len(found) == len(expected) == 22
        for curve in (found, resumed):
            for row, wanted in zip(curve, expected, strict=True):
                assert row == pytest.approx(wanted, rel=2e-4), (row, wanted)


def decayed_on_a_rank(folder: str) -> list[str]:
    """The parameters of the group that decays, of a model that fuses grouped queries,
    keys and values: where they are split, they are several."""
    from transformers import Phi3Config, Phi3ForCausalLM

    as_torchrun_starts_it()
    from autopar.training.trainer import Trainer

    sizes = SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 1}
    model = Phi3ForCausalLM(Phi3Config(**sizes, pad_token_id=0))
    _, data = parts()
    args = arguments(folder, 8, eval_strategy="no")
    trainer = Trainer(model, args, train_dataset=data, parallel={"mesh": "tp=2"})
    trainer.get_train_dataloader()
    decay, _ = trainer.create_optimizer().param_groups
    assert decay["weight_decay"] == 0.1
    chosen = {id(p) for p in decay["params"]}
    return [n for n, p in trainer.step.named_parameters() if id(p) in chosen]


@pytest.mark.slow
def test_pieces_of_a_weight_decay_as_it_does(tmp_path: Path) -> None:
    for names in run_ranks(decayed_on_a_rank, 2, str(tmp_path)):
        pieces = [n for n in names if ".qkv_proj[" in n]
        assert len(pieces) == 3, names
        assert not [n for n in names if "norm" in n]


def trained_by_adafactor(folder: str, mesh: str | None) -> tuple[list[Any], int]:
    """Which looks at whole parameters; and the tokens that were counted."""
    import transformers

    from autopar.training.trainer import Trainer

    model, data = parts()
    options = {"max_steps": 4, "eval_strategy": "no", "optim": "adafactor"}
    options |= {"include_num_input_tokens_seen": "all"}
    if mesh is None:
        args = arguments(folder, 8, **options)
        trainer: Any = transformers.Trainer(model, args, train_dataset=data)
    else:
        as_torchrun_starts_it()
        args = arguments(folder, 4 if "dp" in mesh else 8, **options)
        parallel = {"mesh": mesh, "zero": 3 if "dp" in mesh else 0}
        trainer = Trainer(model, args, train_dataset=data, parallel=parallel)
    trainer.train()
    return curve(trainer), trainer.state.num_input_tokens_seen


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_optimizers_of_whole_parameters_have_them(mesh: str, tmp_path: Path) -> None:
    [(expected, tokens)] = run_ranks(trained_by_adafactor, 1, str(tmp_path), None)
    for rows, counted in run_ranks(trained_by_adafactor, 2, str(tmp_path), mesh):
        assert counted == tokens == 4 * 8 * 16
        for row, wanted in zip(rows, expected, strict=True):
            assert row == pytest.approx(wanted, rel=2e-4), (row, wanted)


def losses_of_gpt2(folder: str, mesh: str | None) -> tuple[list[float], list[str]]:
    """Losses of which transformers' Trainer counts first labels too; and warnings."""
    import logging

    import transformers

    from autopar.training.trainer import Trainer

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    data = [dict(input_ids=i, labels=i) for i in torch.randint(64, (8, 16))]
    args = arguments(folder, 8, eval_strategy="no", max_steps=1)
    model = transformers.GPT2LMHeadModel(config)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("autopar").addHandler(handler)
    if mesh is None:
        trainer: Any = transformers.Trainer(model, args, train_dataset=data)
    else:
        as_torchrun_starts_it()
        parallel = {"mesh": mesh}
        trainer = Trainer(model, args, train_dataset=data, parallel=parallel)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history[:1]], told


@pytest.mark.slow
def test_who_counts_labels_otherwise_is_told(tmp_path: Path) -> None:
    [([theirs], _)] = run_ranks(losses_of_gpt2, 1, str(tmp_path), None)
    [([ours], told)] = run_ranks(losses_of_gpt2, 1, str(tmp_path), "")
    assert theirs == pytest.approx(ours * 15 / 16, rel=1e-4)
    assert any("loss of GPT2LMHeadModel by all labels" in line for line in told)


@pytest.mark.slow
def test_what_would_change_nothing_is_refused(tmp_path: Path) -> None:
    from autopar.passes.errors import AutoparError
    from autopar.training.trainer import Trainer

    wrong: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        '"microbatches"': ({"gradient_accumulation_steps": 4}, {}),
        '"precision": "bf16"': ({"bf16": True}, {}),
        '"recompute": "full"': ({"activation_checkpointing": True}, {}),
        '"loss_fn"': ({"label_smoothing_factor": 0.1}, {}),
        "of the best": ({"load_best_model_at_end": True, "save_steps": 10}, {}),
        "returns|output": ({}, {"compute_loss_func": lambda *_, **__: 0}),
        "trainer.step.parameters": ({}, {"optimizers": (object(), None)}),
    }
    model, _ = parts()
    for fix, (options, given) in wrong.items():
        args = arguments(str(tmp_path), 8, **options)
        with pytest.raises(AutoparError, match=fix):
            Trainer(model, args, parallel={"mesh": "dp=2"}, **given)
