"""Arguments of torch's operators by name, and which of them the compiler reads.

An op that some pass treats specially (a rule, a spelling, a derivative, a localization)
says here which of its arguments those who treat it read, or hand on as they are. A
value other than torch's default in another one is refused: nobody would see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.errors import CaptureError
from passes.graph import Node, Value, parameters, resolve, show

# Where a tensor lies and how, which the rank that runs the program decides.
PLACEMENT = frozenset({"device", "pin_memory", "non_blocking", "memory_format"})
# An op that some pass treats specially -> the arguments that are heeded, of all of its
# overloads. What is not in this table runs as it is, with whatever it is given.
HEEDED: Mapping[str, str] = {
    **dict.fromkeys(
        ("lstm", "gru", "rnn_tanh", "rnn_relu"),
        "input hx params has_biases num_layers dropout train bidirectional batch_first",
    ),
    "__and__": "self other",
    "__or__": "self other",
    "__xor__": "self other",
    "_softmax": "self dim",
    "_to_copy": "self dtype",
    "_unsafe_view": "self size",
    "_weight_norm": "v g dim",
    "add": "self other alpha",
    "addmm": "self mat1 mat2 beta alpha",
    "alias": "self",
    "amax": "self dim keepdim",
    "arange": "start end step dtype",
    "baddbmm": "self batch1 batch2 beta alpha",
    "binary_cross_entropy": "self target weight reduction",
    "binary_cross_entropy_with_logits": "self target weight pos_weight reduction",
    "bmm": "self mat2",
    "broadcast_tensors": "tensors",
    "broadcast_to": "self size",
    "cat": "tensors dim",
    "chunk": "self chunks dim",
    "clone": "self",
    "constant_pad_nd": "self pad value",
    "contiguous": "self",
    "conv1d": "input weight bias stride padding dilation groups",
    "copy": "self src",
    "cosine_embedding_loss": "input1 input2 target margin reduction",
    "hinge_embedding_loss": "self target margin reduction",
    "margin_ranking_loss": "input1 input2 target margin reduction",
    "multi_margin_loss": "self target p margin weight reduction",
    "multilabel_margin_loss": "self target reduction",
    "poisson_nll_loss": "input target log_input full eps reduction",
    "soft_margin_loss": "self target reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap reduction",
    "cross_entropy_loss": "self target weight reduction ignore_index label_smoothing",
    "cumsum": "self dim dtype",
    "detach": "self",
    "dot": "self tensor",
    "dropout": "input p train",
    "einsum": "equation tensors path",
    "embedding": "weight indices padding_idx",
    "empty": "size dtype",
    "empty_like": "self dtype",
    "expand": "self size",
    "expand_as": "self other",
    "fill": "self value",
    "flatten": "self start_dim end_dim",
    "full": "size fill_value dtype",
    "full_like": "self fill_value dtype",
    "gather": "self dim index",
    "glu": "self dim",
    "group_norm": "input num_groups weight bias eps cudnn_enabled",
    "huber_loss": "self target reduction delta",
    "index": "self indices",
    "kl_div": "self target reduction log_target",
    "l1_loss": "self target reduction",
    "layer_norm": "input normalized_shape weight bias eps cudnn_enable",
    "leaky_relu": "self negative_slope",
    "lift_fresh_copy": "self",
    "linalg_vector_norm": "self ord dim keepdim dtype",
    "linear": "input weight bias",
    "log_softmax": "self dim dtype",
    "logsumexp": "self dim keepdim",
    "matmul": "self other",
    "max": "self other dim keepdim",
    "mean": "self dim keepdim dtype",
    "min": "self other dim keepdim",
    "mish": "self",
    "mm": "self mat2",
    "mse_loss": "self target reduction",
    "mul": "self other",
    "narrow": "self dim start length",
    "mv": "self vec",
    "nansum": "self dim keepdim dtype",
    "new_empty": "self size dtype",
    "new_full": "self size fill_value dtype",
    "new_ones": "self size dtype",
    "new_zeros": "self size dtype",
    "nll_loss": "self target weight reduction ignore_index",
    "nll_loss_nd": "self target weight reduction ignore_index",
    "one_hot": "self num_classes",
    "ones": "size dtype",
    "ones_like": "self dtype",
    "pad": "self pad mode value",
    "repeat": "self repeats",
    "repeat_interleave": "self repeats dim output_size",
    "ravel": "self",
    "reshape": "self shape",
    "reshape_as": "self other",
    "rms_norm": "input normalized_shape weight eps",
    "roll": "self shifts dims",
    "rsub": "self other alpha",
    "scalar_tensor": "s dtype",
    "scaled_dot_product_attention": (
        "query key value attn_mask dropout_p is_causal scale enable_gqa"
    ),
    "scatter": "self dim index src value reduce",
    "scatter_add": "self dim index src",
    "select": "self dim index",
    "select_scatter": "self src dim index",
    "silu": "self",
    "slice": "self dim start end step",
    "slice_scatter": "self src dim start end step",
    "smooth_l1_loss": "self target reduction beta",
    "softmax": "self dim dtype",
    "sort": "self stable dim descending",
    "split": "self split_size dim",
    "split_with_sizes": "self split_sizes dim",
    "square": "self",
    "squeeze": "self dim",
    "stack": "tensors dim",
    "sub": "self other alpha",
    "sum": "self dim keepdim dtype",
    "sum_to_size": "self size",
    "tensor_split": "self sections indices dim",
    "to": "self dtype other copy",
    "topk": "self k dim largest sorted",
    "tril": "self diagonal",
    "tril_indices": "row col offset dtype",
    "triu": "self diagonal",
    "type_as": "self other",
    "unbind": "self dim",
    "unflatten": "self dim sizes",
    "unsqueeze": "self dim",
    "var": "self dim unbiased correction keepdim",
    "view": "self size",
    "view_as": "self other",
    "view_as_complex": "self",
    "view_as_real": "self",
    "where": "condition self other",
    "zero": "self",
    "zeros": "size dtype",
    "zeros_like": "self dtype",
    "transpose": "self dim0 dim1",
    "permute": "self dims",
    "movedim": "self source destination",
    "moveaxis": "self source destination",
    "swapaxes": "self axis0 axis1",
    "swapdims": "self dim0 dim1",
    **dict.fromkeys(("t", "numpy_T", "mT", "adjoint"), "self"),
}


def arguments(node: Node) -> dict[str, Any]:
    """Returns what an `aten` op is called with: every argument of its schema, in order,
    by name; torch's default where the node gives none."""
    return {name: node.arg(name) for name in parameters(node.op)}


def call(op: str, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args and kwargs for arguments by name, as torch's dispatcher orders them:
    by name only what has no place. Those at their default are given too."""
    schema = resolve(op)._schema.arguments
    args = tuple(given[a.name] for a in schema if not a.kwarg_only)
    return args, {a.name: given[a.name] for a in schema if a.kwarg_only}


def refuse_unread(node: Node) -> None:
    """Refuses a value that no pass would read.

    Raises: CaptureError that names the argument, if the op is treated specially.
    """
    space, name, *_ = node.op.split(".")
    if space != "aten" or name not in HEEDED:
        return
    heeded = {*HEEDED[name].split(), *PLACEMENT}
    defaults = {a.name: a for a in resolve(node.op)._schema.arguments}
    for name, value in arguments(node).items():
        if name in heeded or is_default(defaults[name], value):
            continue
        if value is None and not defaults[name].has_default_value():
            continue  # of another form of the op, and not given
        text = "a tensor" if isinstance(value, Value) else show(value)
        optional = defaults[name].has_default_value()
        raise CaptureError(
            f"'{node.op}' is called with {name}={text}, which is not supported",
            source=str(node.where),
            fix=f"leave out '{name}'" if optional else "use other operations here",
        )


def is_default(argument: Any, value: Any) -> bool:
    """Whether an argument of a schema has the value that it has if it is left out.
    Tensors are dense, and flags off, unless the model says otherwise."""
    if value is torch.strided and argument.name == "layout":
        return True
    if value is False and not argument.has_default_value():
        return True
    default = argument.default_value
    plain = tuple(default) if isinstance(default, list) else default
    return argument.has_default_value() and not (
        isinstance(value, Value) or value != plain
    )
