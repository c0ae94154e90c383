"""Hugging Face's `Trainer`, whose model is compiled by autopar.

    from autopar.training.trainer import Trainer

    parallel = {"mesh": "dp=2,tp=2", "zero": 1, "microbatches": 2}
    trainer = Trainer(model, args, train_dataset=data, parallel=parallel)
    trainer.train()

Its arguments, data, schedules, callbacks, logs and evaluations are those of
`transformers.Trainer`. What it does by methods without a public name is loading and
saving: `_load_from_checkpoint`, `_save_optimizer_and_scheduler` and
`_load_optimizer_and_scheduler`; and counting tokens: `_track_num_input_tokens`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import autopar
from autopar.passes.errors import AutoparError
from autopar.runtime.agreement.fail_together import on_first
from autopar.runtime.parameters.by_element import Reach, reach_of
from autopar.step import Step

try:
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.utils.generic import can_return_loss, find_labels
except ImportError as error:
    raise AutoparError(
        f"Hugging Face's Trainer cannot be used: {error}",
        fix="pip install 'autopar[trainer]'",
    ) from None

LOG = logging.getLogger("autopar")
STATE = "autopar"  # the folder of weights and optimizer in a Trainer's checkpoint
# What a Trainer would do to the model or its gradients, and how it is said here.
INSTEAD = {
    "gradient_accumulation_steps": '"microbatches", and a greater '
    "per_device_train_batch_size: the update is the same",
    "bf16": '"precision": "bf16"',
    "fp16": '"precision": "fp16"',
    "gradient_checkpointing": '"recompute": "full"',
    "activation_checkpointing": '"recompute": "full"',
    "torch_compile": '"backend": "inductor"',
    "fsdp": '"zero": 3',
    "deepspeed": '"zero": 1, 2 or 3',
    "label_smoothing_factor": '"loss_fn": what computes the loss of output and batch',
    "neftune_noise_alpha": "noise that the model itself adds",
    "auto_find_batch_size": '"memory": what a rank may use',
    "load_best_model_at_end": "trainer.train(resume_from_checkpoint=...), of the best",
}


class Compiled(nn.Module):
    """Stands for the model in a Trainer: without parameters, as a step has them."""

    accepts_loss_kwargs = False  # of all tokens of a batch, a step counts them itself

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.config = getattr(model, "config", None)
        self.loss_type = getattr(model, "loss_type", None)
        self.main_input_name = getattr(model, "main_input_name", "input_ids")
        # A list, as what a module holds by itself is a parameter or module of it.
        self.held = [step]

        def forward(**batch: Any) -> dict[str, Tensor]:
            return {"loss": step.evaluate(**batch)}

        # By which a Trainer leaves columns of a dataset out.
        setattr(forward, "__signature__", inspect.signature(model.forward))  # noqa: B010
        self.forward = forward

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.held[0].parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()


class Trainer(transformers.Trainer):
    """`transformers.Trainer` of a model that a step computes.

    model: as `autopar.compile` takes it; afterwards `trainer.step` has what is trained.
    parallel: keywords of `autopar.compile`; the mesh, or a plan, is given, unless
    example_inputs are. keywords: as `transformers.Trainer` takes it.
    Each data rank loads `per_device_train_batch_size` samples of a batch; evaluations
    are of `per_device_eval_batch_size` samples by all ranks together.
    Raises: AutoparError, for what would change nothing or something else.
    """

    optimizer: Any  # None, until training begins

    def __init__(
        self,
        model: nn.Module,
        args: transformers.TrainingArguments,
        *,
        parallel: Mapping[str, Any],
        **keywords: Any,
    ) -> None:
        self._refuse(args, keywords)
        device = "cpu" if args.device.type == "cpu" else args.device
        self.step = autopar.compile(model, **{"device": device, **parallel})
        self._decayed = set(self.get_decay_parameter_names(model))
        super().__init__(Compiled(model, self.step), args, **keywords)
        self._tell_of_the_count(model)
        if args.label_names is None:
            self.label_names = find_labels(type(model))
        self.can_return_loss = can_return_loss(type(model))
        # Nothing wraps the model; every rank has all of what is evaluated, of which a
        # short last batch counts by its samples; norms are of the whole model.
        self.accelerator.prepare_model = self.accelerator.gather = _as_it_is
        self.accelerator.clip_grad_norm_ = self._clip
        self._share_out(1, 0)

    def _tell_of_the_count(self, model: nn.Module) -> None:
        """Warn where `transformers.Trainer` would divide the model's loss by more
        labels than it is a sum over, as it does of GPT-2."""
        fields = inspect.signature(model.forward).parameters.values()
        counts = any(field.kind is field.VAR_KEYWORD for field in fields)
        shifts = getattr(model, "loss_function", None) is ForCausalLMLoss
        knows = getattr(self, "_loss_shifts_labels", False)
        if counts and shifts and not knows and self.args.process_index == 0:
            LOG.warning(
                "transformers' Trainer divides the loss of %s by all labels, those of "
                "first tokens too, which nothing predicts: its losses and gradients of "
                "rows of n labels are (n - 1) / n of these, which are means",
                type(model).__name__,
            )

    def _refuse(self, args: Any, keywords: Mapping[str, Any]) -> None:
        usual = transformers.TrainingArguments
        for name, instead in INSTEAD.items():
            value = getattr(args, name, None)
            if value and value != getattr(usual, name, None):
                raise AutoparError(
                    f"TrainingArguments({name}={value!r}) is not for a compiled model",
                    fix=f"leave it out, and say it in parallel=: {instead}"
                    if instead.startswith('"')
                    else f"leave it out; instead: {instead}",
                )
        own = type(self).compute_loss is not transformers.Trainer.compute_loss
        if own or keywords.get("compute_loss_func") is not None:
            raise AutoparError(
                "a loss that a Trainer computes is not what the step trains",
                fix='say it in parallel=: "loss_fn": f, of f(output, batch)',
            )
        for name in ("optimizers", "model_init"):
            if keywords.get(name) not in (None, (None, None)):
                raise AutoparError(
                    f"Trainer({name}=) knows parameters that nobody trains: those of "
                    "the step are made of the model",
                    fix="choose by TrainingArguments(optim=), or override "
                    "create_optimizer, with trainer.step.parameters()",
                )

    def _clip(
        self, parameters: object, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        return self.step.clip_grad_norm_(max_norm)

    def _share_out(self, size: int, index: int) -> None:
        """Let loaders that are made from now on give one of `size` parts of batches."""
        args = self.accelerator.dataloader_config

        def prepare(loader: DataLoader[Any], **_: Any) -> DataLoader[Any]:
            return prepare_data_loader(
                loader,
                num_processes=size,
                process_index=index,
                even_batches=args.even_batches,
                use_seedable_sampler=args.use_seedable_sampler,
                data_seed=args.data_seed,
            )

        self.accelerator.prepare_data_loader = prepare

    def get_tp_size(self) -> int:
        """Ranks that load the same samples."""
        return self.args.world_size // self.step.data_ranks

    def get_train_dataloader(self) -> DataLoader[Any]:
        self._share_out(self.step.data_ranks, self.step.data_rank)
        loader = super().get_train_dataloader()
        self._share_out(1, 0)
        first = DataLoader(
            loader.dataset, self.args.train_batch_size, collate_fn=loader.collate_fn
        )
        self.step.build(local=True, **next(iter(first)))
        return loader

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Creates the `TrainingArguments`' optimizer, of the step's parameters."""
        if self.optimizer is not None:
            return self.optimizer
        held = [(n, p) for n, p in self.step.named_parameters() if p.requires_grad]
        specs = self.step.program.parameters
        # A weight that is cut into pieces has several parameters.
        decay = [p for n, p in held if specs[n].part.source in self._decayed]
        known = {id(p) for p in decay}
        rest = [p for _, p in held if id(p) not in known]
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if own := {"params", "model", "optimizer_dict"} & {*options}:
            raise AutoparError(
                f"TrainingArguments(optim='{self.args.optim}') chooses {own.pop()} of "
                "the model by itself",
                fix="take one whose state is by element, as optim='adamw_torch'",
            )
        groups = [
            {"params": decay, "weight_decay": self.args.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = kind(groups, **options)  # both on each stage of a pipeline
        if reach_of(self.optimizer, [p for _, p in held]) is Reach.PARAMETER:
            self.step.gather_for(self.optimizer)
        return self.optimizer

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Counts what each data rank has loaded."""
        state = self.state
        before = state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        own = self.step.data_rank, state.num_input_tokens_seen - before
        state.num_input_tokens_seen = before
        if self.args.include_num_input_tokens_seen != "no":
            loaded = dict(self.step.comm.gather_object(own))
            state.num_input_tokens_seen += sum(loaded.values())

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        model.train()
        return self.step(local=True, **self._prepare_inputs(inputs)).detach()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        batch = self._prepare_inputs(inputs)
        self.step.build(**batch)
        if prediction_loss_only:
            return self.step.evaluate(**batch), None, None
        outputs = self.step.evaluate(outputs=("logits",), **batch)
        labels = [batch[name] for name in self.label_names if name in batch]
        alone = labels[0] if len(labels) == 1 else tuple(labels) or None
        return outputs["loss"], outputs["logits"], alone

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write what `from_pretrained` reads; all ranks call it."""
        folder = Path(output_dir or self.args.output_dir)
        scratch: list[TemporaryDirectory[str]] = []

        def begin() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            scratch.append(TemporaryDirectory(dir=folder))

        def finish() -> None:
            with scratch[0] as made:
                for file in (Path(made) / "model").iterdir():
                    file.replace(folder / file.name)

        comm = self.step.comm
        on_first(comm, begin)
        name = scratch[0].name if scratch else str(folder)
        self.step.save_pretrained(Path(name) / "model", self.processing_class)
        on_first(comm, finish)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves these with the weights, so that other plans can go on from them."""
        extra = self.lr_scheduler.state_dict()
        self.step.save(Path(output_dir) / STATE, self._own(), extra=extra)

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        """Does nothing: `_load_optimizer_and_scheduler` reads the weights too."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extra = self.step.load(Path(checkpoint) / STATE, self._own())
            self.lr_scheduler.load_state_dict(extra)

    def _own(self) -> Optimizer:
        """The user's optimizer, which accelerate may have wrapped."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value
