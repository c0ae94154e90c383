"""Ops that models call and that `passes.capture` takes apart: what it heeds of them."""

from __future__ import annotations

from ..ops import extents, parts, shrunk
from ..ops.op import Elements, Op

HEEDED = {
    "_weight_norm": "v g dim",
    "broadcast_tensors": "tensors",
    "broadcast_to": "self size",
    "glu": "self dim",
    "nansum": "self dim keepdim dtype",
    "sum_to_size": "self size",
    "tensor_split": "self sections indices dim",
}

# What autocast computes in float32.
WIDE = {
    "cosine_embedding_loss": "input1 input2 target margin reduction",
    "hinge_embedding_loss": "self target margin reduction",
    "margin_ranking_loss": "input1 input2 target margin reduction",
    "multi_margin_loss": "self target p margin weight reduction",
    "multilabel_margin_loss": "self target reduction",
    "poisson_nll_loss": "input target log_input full eps reduction",
    "soft_margin_loss": "self target reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap reduction",
    "logsumexp": "self dim keepdim",
    **dict.fromkeys(
        ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"), ""
    ),
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

# The operand itself, or a cast of it.
MOVED: dict[str, tuple[str, Elements]] = {
    "alias": ("self", "same"),
    "contiguous": ("self", "same"),
    "type_as": ("self other", "cast"),
}

CLASSES = "self target weight reduction ignore_index"

OPS = (
    *(Op(f"aten.{name}", heeds) for name, heeds in HEEDED.items()),
    Op("aten.rsub", "self other alpha", shrunk=shrunk.comparison),
    *(Op(f"aten.{name}", heeds, autocast="wide") for name, heeds in WIDE.items()),
    Op(
        "aten.group_norm",
        "input num_groups weight bias eps cudnn_enabled",
        autocast="wide",
        extents=extents.grouped,
        shrunk=shrunk.group_norm,
    ),
    *(
        Op(
            f"aten.{n}",
            heeds,
            view="shape",
            put_back=parts.reshaped,
            shrunk=shrunk.view,
        )
        for n, heeds in RESHAPED.items()
    ),
    *(
        Op(
            f"aten.{name}",
            heeds,
            elements=elements,
            extents=extents.aligned,
            counts=True,
            put_back=parts.reshaped,
        )
        for name, (heeds, elements) in MOVED.items()
    ),
    Op("aten.clone", "self", elements="same", extents=extents.aligned, counts=True),
    *(
        Op(f"aten.{name}", put_back=parts.reshaped)
        for name in ("alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    ),
    Op("aten._to_copy", "self dtype", elements="cast"),
    Op("aten.expand_as", "self other", put_back=parts.reshaped),
    Op(
        "aten.narrow",
        "self dim start length",
        view="part",
        part=parts.narrowed,
        put_back=parts.into_narrow,
    ),
    *(
        Op(
            f"aten.{name}_scatter",
            f"self src dim {heeds}",
            part=part,
            values="replaced",
        )
        for name, heeds, part in (
            ("select", "index", parts.picked),
            ("slice", "start end step", parts.sliced),
        )
    ),
    *(
        Op(
            f"aten.{name}",
            f"self {heeds}",
            extents=extents.repeated,
            values="moved",
            shrunk=shrunk.repeat,
        )
        for name, heeds in (("repeat", "repeats"), ("tile", "dims"))
    ),
    Op(
        "aten.index", "self indices", extents=extents.indexed, counts=True, selects=True
    ),
    Op(
        "aten.index_select",
        "self dim index",
        extents=extents.selected_rows,
        values="moved",
        looks_up="self index dim",
    ),
    *(
        Op(f"aten.{name}", heeds, extents=change, autocast="wide", labels="target")
        for name, heeds, change in (
            ("cross_entropy_loss", f"{CLASSES} label_smoothing", extents.cross_entropy),
            ("nll_loss_nd", CLASSES, extents.cross_entropy),
            ("nll_loss", CLASSES, None),
            ("nll_loss2d", "", None),
        )
    ),
    Op(
        "aten.index_put",
        "self indices values accumulate",
        values="replaced",
        autocast="equal",
    ),
)
RESHAPES = frozenset({"aten.reshape", *(f"aten.{name}" for name in RESHAPED)})
