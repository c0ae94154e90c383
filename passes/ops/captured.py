"""Ops that models call and that `passes.capture` takes apart: what it heeds of them."""

from __future__ import annotations

from ..ops.op import Op

HEEDED = {
    "_to_copy": "self dtype",
    "_weight_norm": "v g dim",
    "alias": "self",
    "broadcast_tensors": "tensors",
    "broadcast_to": "self size",
    "clone": "self",
    "contiguous": "self",
    "cosine_embedding_loss": "input1 input2 target margin reduction",
    "hinge_embedding_loss": "self target margin reduction",
    "margin_ranking_loss": "input1 input2 target margin reduction",
    "multi_margin_loss": "self target p margin weight reduction",
    "multilabel_margin_loss": "self target reduction",
    "poisson_nll_loss": "input target log_input full eps reduction",
    "soft_margin_loss": "self target reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap reduction",
    "cross_entropy_loss": "self target weight reduction ignore_index label_smoothing",
    "expand_as": "self other",
    "glu": "self dim",
    "group_norm": "input num_groups weight bias eps cudnn_enabled",
    "index": "self indices",
    "logsumexp": "self dim keepdim",
    "narrow": "self dim start length",
    "nansum": "self dim keepdim dtype",
    "nll_loss": "self target weight reduction ignore_index",
    "nll_loss_nd": "self target weight reduction ignore_index",
    "repeat": "self repeats",
    "rsub": "self other alpha",
    "select_scatter": "self src dim index",
    "slice_scatter": "self src dim start end step",
    "sum_to_size": "self size",
    "tensor_split": "self sections indices dim",
    "type_as": "self other",
}

# A reshape by whatever name: all elements, in their order.
RESHAPED = {
    "view": "self size",
    "view_as": "self other",
    "_unsafe_view": "self size",
    "reshape_as": "self other",
    "ravel": "self",
    "flatten": "self start_dim end_dim",
    "unflatten": "self dim sizes",
    "squeeze": "self dim",
    "unsqueeze": "self dim",
}

OPS = (
    *(Op(f"aten.{name}", heeds) for name, heeds in HEEDED.items()),
    *(Op(f"aten.{name}", heeds, view="shape") for name, heeds in RESHAPED.items()),
)
RESHAPES = frozenset({"aten.reshape", *(f"aten.{name}" for name in RESHAPED)})
