"""ViT written from its paper (Dosovitskiy et al. 2021, equations 1 to 4) in NumPy, an image at a time, in float64.

Loops over patches and heads, nothing of meshtrain. It takes the canonical parameter tree.
"""

from typing import Any

import numpy as np
from scipy.special import erf

Tree = Any


def of_layer(tree: Tree, layer: int) -> Tree:
    """The weights of a layer, out of stacked ones."""
    if isinstance(tree, dict):
        return {name: of_layer(part, layer) for name, part in tree.items()}
    return tree[layer]


def patches(image: np.ndarray, size: int) -> np.ndarray:
    """An image [H, W, C] as patches from the upper left along the rows, each's numbers in the order row, column,
    channel.
    """
    height, width, _ = image.shape
    corners = [(y, x) for y in range(0, height, size) for x in range(0, width, size)]
    return np.stack([image[y : y + size, x : x + size].reshape(-1) for y, x in corners])


def norm(p: Tree, x: np.ndarray, eps: float) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def attention(p: Tree, x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x) + p["out_bias"]
    for head in range(p["q"].shape[1]):
        q, k, v = (x @ p[name][:, head] + p[f"{name}_bias"][head] for name in "qkv")
        scores = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
        out += scores / scores.sum(-1, keepdims=True) @ v @ p["out"][head]
    return out


def mlp(p: Tree, x: np.ndarray) -> np.ndarray:
    h = x @ p["up"] + p["up_bias"]
    return h * (1 + erf(h / np.sqrt(2))) / 2 @ p["down"] + p["down_bias"]


def logits(parameters: Tree, image: np.ndarray, size: int, eps: float) -> np.ndarray:
    """[classes] of one image; the class token is read where there is one, else the mean."""
    as_float64 = lambda tree: (
        {k: as_float64(v) for k, v in tree.items()}
        if isinstance(tree, dict)
        else np.asarray(tree, np.float64)
    )
    p = as_float64(parameters)
    embedding, blocks, head = p["embedding"], p["blocks"], p["head"]
    x = (
        patches(np.asarray(image, np.float64), size) @ embedding["patches"]
        + embedding["bias"]
    )
    has_class = "class_token" in embedding
    if has_class:
        x = np.concatenate([embedding["class_token"][None], x])
    x = x + embedding["positions"]
    for layer in range(len(blocks["mlp"]["up"])):
        block = of_layer(blocks, layer)
        x = x + attention(block["attention"], norm(block["attention_norm"], x, eps))
        x = x + mlp(block["mlp"], norm(block["mlp_norm"], x, eps))
    x = norm(head["norm"], x, eps)
    return (x[0] if has_class else x.mean(0)) @ head["weight"] + head["bias"]
