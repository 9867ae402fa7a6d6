"""The adapters of a run as a folder of the package peft (Mangrulkar et al. 2022), without the model beneath them.

There, a module's matrix has one pair of factors, lora_A [r, in] and lora_B [out, r], and (alpha / r) lora_B lora_A is
added. GPT-2 has queries, keys and values in one matrix, and a run has a pair for each: they become one pair with the
sum of their ranks. Its lora_A has theirs one below the other, its lora_B has theirs in the blocks of a diagonal.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from meshtrain.files import JsonObject, write_whole
from meshtrain.hf import export, names, tensor_files
from meshtrain.hf.config_json import ADAPTERS_FILE
from meshtrain.hf.names import Weight
from meshtrain.models.layers import A, B
from meshtrain.models.lora import LoraOptions
from meshtrain.models.task import Params
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.trees import leaves_with_paths

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # the model inside of peft's own two modules


def write(
    folder: Path,
    family: str,
    options: DecoderOptions,
    adapters: LoraOptions,
    params: Params,
    dtype: str,
    base: str | None,
) -> int:
    """Writes adapter_config.json and adapter_model.safetensors, and returns the bytes of the tensors.

    Args:
      folder: that exists.
      family: a key of `config.FAMILIES`.
      options: of the decoder.
      adapters: with which the run was trained; the rank is not 0.
      params: with layers in layer order, unboxed; every array is addressable by this process.
      dtype: a key of `export.DTYPES`; values are rounded to it.
      base: the path of the model beneath the adapters; None: it is no Hugging Face folder.
    """
    leaves = dict(leaves_with_paths(params))
    modules = _modules(family, options, leaves)
    size = names.sizes(options)
    places = [(rows, layer) for rows in modules for layer in range(*names.stack(rows[0], size))]
    shapes = dict[str, tuple[int, int]]()
    for rows, layer in places:
        shapes |= zip(_names(names.tensor_name(rows[0], (layer,), size)), _shapes(rows, leaves), strict=True)
    factors = itertools.chain.from_iterable(_factors(rows, leaves, layer) for rows, layer in places)
    export.write_file(folder / WEIGHTS_FILE, shapes, factors, dtype)
    stated = _config(modules, adapters, leaves, base)
    write_whole(folder / ADAPTERS_FILE, json.dumps(stated, indent=2) + "\n")
    item_bytes = tensor_files.READABLE[export.DTYPES[dtype]].itemsize
    return sum(map(math.prod, shapes.values())) * item_bytes


def _modules(family: str, options: DecoderOptions, leaves: Mapping[str, jax.Array]) -> list[list[Weight]]:
    """Returns, for each matrix with an adapter on any part of it, the rows of all its parts."""
    return [rows for rows in names.by_tensor(names.weights(family, options)) if _adapted(rows, leaves)]


def _adapted(rows: Sequence[Weight], leaves: Mapping[str, jax.Array]) -> list[Weight]:
    return [row for row in rows if f"{row.path}{A}" in leaves]


def _names(tensor: str) -> list[str]:
    module = _PREFIX + tensor.removesuffix(".weight")
    return [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]


def _shapes(rows: Sequence[Weight], leaves: Mapping[str, jax.Array]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of lora_A and lora_B."""
    own = _adapted(rows, leaves)
    a, b = (leaves[f"{own[0].path}{end}"].shape for end in (A, B))
    rank = len(own) * b[1]
    return (rank, math.prod(a[1:-1])), (sum(_num_outputs(row, leaves) for row in rows), rank)


def _num_outputs(row: Weight, leaves: Mapping[str, jax.Array]) -> int:
    """Returns how many numbers a matrix makes; a part without an adapter of its own is a projection, [L, D, ...]."""
    path = f"{row.path}{B}" if f"{row.path}{B}" in leaves else row.path
    return math.prod(leaves[path].shape[2:])


def _factors(rows: Sequence[Weight], leaves: Mapping[str, jax.Array], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns lora_A and lora_B of a layer."""
    of_a, of_b = (np.zeros(shape, np.float32) for shape in _shapes(rows, leaves))
    own = _adapted(rows, leaves)
    for index, row in enumerate(own):
        a, b = (export.on_host(leaves[f"{row.path}{end}"], layer) for end in (A, B))
        rank, begin = len(b), sum(_num_outputs(one, leaves) for one in rows[: rows.index(row)])
        ranks = slice(index * rank, (index + 1) * rank)
        of_a[ranks] = a.reshape(-1, rank).T
        of_b[begin : begin + b[0].size, ranks] = b.reshape(rank, -1).T
    return of_a, of_b


def _config(
    modules: Sequence[Sequence[Weight]], adapters: LoraOptions, leaves: Mapping[str, jax.Array], base: str | None
) -> JsonObject:
    """Returns the object of an adapter_config.json."""
    named = {rows[0].name.partition("{}.")[2].removesuffix(".weight"): len(_adapted(rows, leaves)) for rows in modules}
    alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
    power = 0.5 if adapters.rank_stabilized else 1
    # Stored as [in, out] rather than [out, in]: the first dim is one that the product sums over.
    is_transposed = [re.findall(r"\w", row.stored)[0] == row.layout[0] for rows in modules for row in rows]
    assert len(set(is_transposed)) == 1, "all matrices of a family are stored alike"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        # The scale stays what it is where a matrix has a larger rank.
        "rank_pattern": {name: count * adapters.rank for name, count in named.items() if count > 1},
        "alpha_pattern": {name: alpha * count**power for name, count in named.items() if count > 1},
        "target_modules": list(named),
        "fan_in_fan_out": is_transposed[0],
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": adapters.rank_stabilized,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
