"""Which rows of which tensor of a file hold a parameter of the decoder: the same table for reading and for writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.models.families import Family, Tensor


class Part(NamedTuple):
    """A parameter's rows in a tensor of a file.

    index: of the parameter's leading axes (layer, expert); shape: the rows, in the file's orientation.
    """

    tensor: Tensor
    index: tuple[int, ...]
    shape: tuple[int, ...]


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its path in the tree."""
    return {path: tuple(leaf.shape) for path, leaf in flatten(abstract_params(config)).items()}


def file_parts(
    family: Family, name_of: Callable[[Tensor], str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Part]]:
    """What each tensor of the file holds: one parameter's values, or the rows of several, one after another."""
    parts: dict[str, list[Part]] = {}
    num_dense = shapes.get("dense_layers/attn/q", (0,))[0]
    for tensor in family.tensors:
        if tensor.path not in shapes:
            continue  # the head of a tied model; biases that this one has not
        shape = shapes[tensor.path]
        own = shape[tensor.num_indices :]
        own = own[::-1] if tensor.transpose else own
        for index in np.ndindex(shape[: tensor.num_indices]):
            named = dict(zip(("layer", "expert"), index, strict=False))
            if tensor.path.startswith("layers/"):
                named["layer"] += num_dense
            parts.setdefault(name_of(tensor).format(**named), []).append(Part(tensor, index, own))
    return parts


def file_shape(in_file: Sequence[Part]) -> tuple[int, ...]:
    """Of the tensor that holds these parts."""
    return (sum(part.shape[0] for part in in_file), *in_file[0].shape[1:])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """'a/b/c' -> leaf of a nested dict."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
