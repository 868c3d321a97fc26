"""Checks of products in float8: their recipes, the layers that they leave out, and the widths that they need."""

from collections.abc import Iterator

from meshtrain.config.schema import RECIPES, Config
from meshtrain.config.stacks import LINEAR
from meshtrain.errors import nearest, short


def float8_problems(config: Config) -> Iterator[str]:
    """Yields a sentence on each thing that products in float8 cannot be made of."""
    precision = config.precision
    layers = config.model.layers
    skip = precision.float8_skip
    for name, legal in (("matmul", ("compute", "float8")), ("float8_recipe", RECIPES)):
        value = getattr(precision, name)
        if value.lower() in ("mxfp8", "nvfp4"):
            yield (
                f"precision.{name} is {value}, whose products are Blackwell's, and not here; legal are "
                f"{', '.join(legal)}."
            )
        elif value not in legal:
            yield (
                f"precision.{name} is {short(repr(value))}; legal are "
                f"{', '.join(legal)}{nearest(value, legal) or '.'}"
            )
    if precision.matmul != "float8":
        return
    if len(skip) != 2:
        yield (
            f"precision.float8_skip is {short(list(skip))}; give two numbers, of the first layers and of the last "
            "ones."
        )
    elif sum(skip) >= layers:
        yield (
            f"precision.float8_skip {list(skip)} leaves none of model.layers {layers} in float8; legal are "
            "fewer in all."
        )
    # multiplied in the compute dtype
    if precision.float8_recipe == "blockwise":
        return
    tensor = config.mesh.tensor
    for name, width, is_split in _product_widths(config):
        if width % (16 * tensor if is_split else 16):
            over = f" over mesh.tensor {tensor}" if is_split and tensor > 1 else ""
            yield (
                f"{name} {width}{over} is not a multiple of 16, as products in float8 need; widen it, or set "
                "precision.matmul to compute."
            )


def _product_widths(config: Config) -> Iterator[tuple[str, int, bool]]:
    """Yields each side of a layer's products: the keys that make it, its width, and whether mesh.tensor splits it."""
    model = config.model
    mla = model.mla
    yield "model.d_model", model.d_model, False
    yield "model.heads x model.head_dim", model.heads * model.head_dim, True
    if mla.kv_rank:
        yield "model.mla.q_rank", mla.q_rank, False
        yield "model.mla.kv_rank", mla.kv_rank, False
        yield "model.mla.rope", mla.rope, False
        yield "model.heads x model.mla.nope", model.heads * mla.nope, True
        yield "model.heads x model.mla.value", model.heads * mla.value, True
    else:
        yield "model.kv_heads x model.head_dim", model.kv_heads * model.head_dim, False
    yield "model.d_ff", model.d_ff, True
    if LINEAR in model.pattern:
        linear = model.linear
        keys = linear.key_heads * linear.key_dim
        values = linear.value_heads * linear.value_dim
        yield "model.linear.key_heads x model.linear.key_dim", keys, True
        yield "model.linear.value_heads x model.linear.value_dim", values, True
