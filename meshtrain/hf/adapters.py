"""Reads and writes LoRA adapters as a folder of the package peft (Mangrulkar et al. 2022), without the base model.

In peft, a module's matrix has one pair of factors, lora_A [r, in] and lora_B [out, r], and (alpha / r) lora_B lora_A is
added to the matrix. GPT-2 stores queries, keys and values in one matrix, and a run has a pair of factors for each of
them. Export joins these pairs into one pair whose rank is the sum of their ranks: lora_A concatenates the rows, lora_B
is block diagonal. When import reads such a pair, queries, keys and values each get their own block. If peft trained the
pair, they each get a copy of lora_A, and their own rows of lora_B.
"""

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from meshtrain.cli import flags, foreign
from meshtrain.errors import Problem, Problems, UserError, refuse
from meshtrain.files import Json, JsonObject, expand_user, read_json, what_is_at, write_whole
from meshtrain.hf import export, names, tensor_files
from meshtrain.hf.config_export import family_of
from meshtrain.hf.config_json import ADAPTERS_FILE, CONFIG_FILE, describe_model, is_described
from meshtrain.hf.folder import array
from meshtrain.hf.names import Weight
from meshtrain.hf.values import text_of
from meshtrain.launch import peers
from meshtrain.models.layers import A, B
from meshtrain.models.lora import LoraOptions
from meshtrain.models.task import Params
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.options import MOST, Value
from meshtrain.sharding.trees import leaves_with_paths

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # peft wraps the model in two modules
Factors: TypeAlias = Sequence[tuple[np.ndarray, np.ndarray]]  # lora_A and lora_B of a matrix, for each layer
_LEGAL: Mapping[str, tuple[Json, ...]] = {
    "init_lora_weights": (None, True, False, "gaussian", "eva"),  # other values, such as pissa, change the base weights
    "alora_invocation_tokens": (None, []),  # tokens that turn adapters on
    "peft_type": (None, "LORA"),
}
_LEAST_ALPHA = 1e-30  # far below every alpha in use; float32 still represents alpha / rank
_WRITTEN = f"the original {ADAPTERS_FILE} from peft"
_AGAIN = "peft's merge_and_unload(), then save_pretrained(DIR)"


class Adapters(NamedTuple):
    """An opened folder of adapters.

    Attributes:
      directory: the absolute path of the folder.
      options: the LoRA options in adapter_config.json, except `targets`, which has its default value.
      base: the base model's path or name in adapter_config.json; '' if the file does not state it.
      stored: name -> tensor, for all tensors of the folder.
    """

    directory: Path
    options: LoraOptions
    base: str
    stored: Mapping[str, tensor_files.Stored]


def is_folder(directory: str | Path) -> bool:
    """Returns whether a folder contains adapters but no model."""
    at = expand_user(directory)
    return what_is_at(at / ADAPTERS_FILE) == "a file" and what_is_at(at / CONFIG_FILE) != "a file"


def open_adapters(directory: str | Path) -> Adapters:
    """Opens a folder of adapters; reads adapter_config.json and the headers of the tensor files.

    Raises:
      UserError: a file is missing or damaged, adapter_config.json has an unsupported value, or the adapters do not all
        have the same scale.
    """
    at = expand_user(directory).absolute()
    file = at / ADAPTERS_FILE
    try:
        given = read_json(file.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError(f"it contains {type(given).__name__}")
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(file, fault=f"not read ({error})", allowed="a JSON object", nearest=_WRITTEN)
        ) from error
    problems = Problems()
    options, base = _parse_options(given, problems), ""
    for key, legal in _LEGAL.items():
        if given.get(key) not in legal:
            allowed = ", ".join(map(str, legal))
            problems.add(
                Problem(
                    key,
                    got=text_of(given[key]),
                    allowed=f"{allowed}, which do not change the base model",
                    nearest=_AGAIN,
                )
            )
    if given.get("base_model_name_or_path") is not None:
        base = _typed_value(given, "base_model_name_or_path", str, problems) or ""
    stored, of_files = tensor_files.tensors(at)
    refuse([*(problem.at(file) for problem in problems.lines()), *(of_files or tensor_files.unreadable(stored))])
    if not stored:
        raise UserError(
            Problem(at / WEIGHTS_FILE, got="no tensors", allowed="lora_A and lora_B of matrices", nearest=_AGAIN)
        )
    assert options is not None, "options are None only if there are problems"
    return Adapters(at, options, base, stored)


def _parse_options(given: JsonObject, problems: Problems) -> LoraOptions | None:
    """Returns the LoRA options in an adapter_config.json, or None if a value is missing or invalid.

    `rank_pattern` and `alpha_pattern` may set another rank and alpha for single modules. It is a problem if such a
    module has another scale (alpha / rank) than `lora_alpha` and `r`.

    Args:
      given: the content of adapter_config.json.
      problems: error lines; extended in place.
    """
    rank, alpha = _number(given, "r", int, problems), _number(given, "lora_alpha", float, problems)
    is_stabilized = _typed_value(given, "use_rslora", bool, problems) if given.get("use_rslora") is not None else False
    patterns = []
    for key, kind in (("rank_pattern", int), ("alpha_pattern", float)):
        values = given[key] if given.get(key) is not None else {}
        if not isinstance(values, dict):
            problems.add(Problem(key, got=text_of(values), allowed="an object, module -> number", nearest=_WRITTEN))
            values = {}
        patterns.append({name: _number(values, name, kind, problems, f"{key}.") for name in values})
    if problems.lines():
        return None
    options = LoraOptions(rank, alpha, rank_stabilized=is_stabilized)
    ranks, alphas = patterns
    for name in {**ranks, **alphas}:
        own = dataclasses.replace(options, rank={name: rank, **ranks}[name], alpha={name: alpha, **alphas}[name])
        if not math.isclose(own.scale, options.scale):
            problems.add(
                Problem(
                    name,
                    got=(
                        f"the scale {own.scale:g} according to the patterns, but {options.scale:g} according to r "
                        "and lora_alpha"
                    ),
                    allowed="one scale for all adapters of a folder",
                    nearest=_AGAIN,
                )
            )
    return options


def _number(given: JsonObject, key: str, kind: type, problems: Problems, prefix: str = "") -> Value:
    """Returns the positive number at a key; if it is missing or out of range, adds a problem and returns None.

    The arguments are explained in `_typed_value`; `kind` is int or float.
    """
    value, least = _typed_value(given, key, kind, problems, prefix), 1 if kind is int else _LEAST_ALPHA
    if value is not None and not least <= value <= MOST[kind]:
        allowed = f"{least:g} to {MOST[kind]:.10g}"
        problems.add(Problem(f"{prefix}{key}", got=f"{value:.10g}", allowed=allowed, nearest=_WRITTEN))
        return None
    return value


def _typed_value(given: JsonObject, key: str, kind: type, problems: Problems, prefix: str = "") -> Value:
    """Returns the value at a key; if it is missing or not of type `kind`, adds a problem and returns None.

    Args:
      given: a JSON object.
      key: the key.
      kind: the required type.
      problems: error lines; extended in place.
      prefix: a text before the key in the error line, such as `rank_pattern.`.
    """
    if given.get(key) is None:
        problems.add(Problem(f"{prefix}{key}", got="nothing", allowed=kind.__name__, nearest=_WRITTEN))
        return None
    try:
        return flags.convert(given[key], kind)
    except UserError as error:
        problems.add(error.problems[0].with_parts(key=f"{prefix}{key}", nearest=_WRITTEN))
        return None


def factors(found: Adapters, base: str, options: DecoderOptions) -> tuple[LoraOptions, dict[str, Factors]]:
    """Returns the LoRA options and the factors of a folder of adapters.

    `targets` of the options is a pattern that matches exactly the adapted matrices. The factors are a mapping: path of
    a matrix -> (lora_A, lora_B) for each layer, as views of the files. All processes must call this function, because
    it checks that they see the same files.

    Args:
      found: the opened folder.
      base: the path of the base model; if it is a Hugging Face folder, its config.json determines the family.
      options: the options of the decoder.

    Raises:
      UserError: one line for each tensor that is not a factor of a layer's matrix, or that has another shape or rank;
        or processes see different files.
    """
    facts: dict[str, Json] = {"options": repr(found.options), "tensors": sorted(found.stored)}
    facts["content"] = tensor_files.content_hash(found.stored)
    peers.refuse_differences("the folder of adapters", facts, peers.SAME_FILES)
    family = describe_model(base, ignore=None).family if is_described(base) else family_of(options)
    size, result, known, rank = names.sizes(options), dict[str, Factors](), set[str](), found.options.rank
    tensors = tensor_files.open_tensors(found.stored)
    for rows in names.by_tensor(names.weights(family, options)):
        layers = [_names(names.tensor_name(rows[0], place, size)) for place in np.ndindex(*names.stack(rows[0], size))]
        wanted = set(itertools.chain.from_iterable(layers))
        if len(rows[0].stacks) != 1 or not wanted <= found.stored.keys():
            continue
        inputs, outputs = names.shape_in_file(rows[0], size)[:: 1 if _is_transposed(rows[0]) else -1]
        pairs = [(tensors[a], tensors[b]) for a, b in layers]
        if all((*a.shape[1:], *b.shape) == (inputs, outputs, *pairs[0][0].shape[:1]) for a, b in pairs):
            widths = [math.prod(size[letter] for letter in row.layout.split()[1:]) for row in rows]
            own = _split_matrices(rows, widths if len(rows) > 1 else [outputs], pairs, rank)
            result, known = result | own, known | (wanted if own else set())
    strange = Problems(
        Problem(
            f"{found.directory}: {name}",
            got=list(found.stored[name].shape),
            allowed=(
                f"lora_A [{rank}, inputs] and lora_B [outputs, {rank}] of all layers, of a matrix of attention or mlp "
                f"in a {family}"
            ),
            nearest=_AGAIN,
        )
        for name in found.stored
        if name not in known
    )
    refuse(strange.lines())
    return dataclasses.replace(found.options, targets="|".join(f"^{path}$" for path in result)), result


def _split_matrices(rows: Sequence[Weight], widths: Sequence[int], pairs: Factors, rank: int) -> dict[str, Factors]:
    """Splits the factors of one tensor into the factors of its matrices; returns path of a matrix -> its factors.

    Two forms of lora_B are supported: each matrix uses separate columns (ranks), or all matrices use all columns. If
    lora_B has neither form, the result is {}. A matrix whose rows of lora_B are zero in all layers has no adapter and
    is not in the result, unless all of lora_B is zero.

    Args:
      rows: the tensor's matrices: rows of the table `names.weights`.
      widths: the number of outputs of each matrix.
      pairs: (lora_A, lora_B) of the tensor for each layer.
      rank: the rank of the factors of one matrix.
    """
    ends, of_b = itertools.accumulate(widths), [b for _, b in pairs]
    placed = [(row, slice(end - width, end)) for row, end, width in zip(rows, ends, widths, strict=True)]
    own = [(row, out) for row, out in placed if any(b[out].any() for b in of_b)] or placed
    step = rank if of_b[0].shape[1] == rank * len(own) else 0
    cuts = [(row.path, out, slice(n * step, n * step + rank)) for n, (row, out) in enumerate(own)]
    covered = [sum(np.count_nonzero(b[out, ranks]) for _, out, ranks in cuts) for b in of_b]
    if covered != [np.count_nonzero(b) for b in of_b] or of_b[0].shape[1] < rank:
        return {}
    return {path: [(a[ranks], b[out, ranks]) for a, b in pairs] for path, out, ranks in cuts}


def split_factors(given: Mapping[str, Factors]) -> list[list[str]]:
    """Returns the groups of matrices, as lists of paths, that share one lora_A in the files.

    A run trains a separate copy of lora_A for each matrix of a group.

    Args:
      given: path of a matrix -> its factors, from `factors`.
    """
    groups = collections.defaultdict[int, list[str]](list)
    for path, pairs in given.items():
        groups[pairs[0][0].__array_interface__["data"][0]].append(path)
    return [paths for paths in groups.values() if len(paths) > 1]


def read(given: Mapping[str, Factors], like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Copies factors into sharded arrays; returns path of a factor -> array.

    Prints a warning if a factor contains NaN or infinity.

    Args:
      given: path of a matrix -> its factors, from `factors`.
      like: path of a factor -> the shape, dtype and sharding of its array.
    """
    arrays, not_finite = dict[str, jax.Array](), dict[str, None]()
    for path, place in itertools.product(given, (0, 1)):
        leaf = like[name := f"{path}{(A, B)[place]}"]
        views = [pair[place].T.reshape(leaf.shape[1:]) for pair in given[path]]
        own = [name] * len(views)
        arrays[name] = array(views, leaf, stack=(len(views),), names=own, not_finite=not_finite)
    tensor_files.warn_not_finite(WEIGHTS_FILE, not_finite)
    return arrays


def write(
    folder: Path,
    family: str,
    options: DecoderOptions,
    adapters: LoraOptions,
    params: Params,
    dtype: str,
    base: str | None,
) -> int:
    """Writes adapter_config.json and adapter_model.safetensors, and returns the number of bytes of the tensors.

    Args:
      folder: an existing folder.
      family: a key of `families.FAMILIES`.
      options: the options of the decoder.
      adapters: the LoRA options of the run; the rank is not 0.
      params: the parameters, without Flax's boxes. Stacked layers are in layer order, not grouped by pipeline stage.
        Every array is addressable by this process.
      dtype: a key of `export.DTYPES`; values are rounded to it.
      base: the path of the base model; None if the base model is not a Hugging Face folder.
    """
    leaves = dict(leaves_with_paths(params))
    # For each tensor that contains at least one adapted matrix: the table rows of all its matrices.
    modules = [rows for rows in names.by_tensor(names.weights(family, options)) if _adapted_paths(rows, leaves)]
    size = names.sizes(options)
    places = [(rows, layer) for rows in modules for layer in range(*names.stack(rows[0], size))]
    shapes = dict[str, tuple[int, int]]()
    for rows, layer in places:
        shapes |= zip(_names(names.tensor_name(rows[0], (layer,), size)), _shapes(rows, leaves), strict=True)
    arrays = itertools.chain.from_iterable(_factors(rows, leaves, layer) for rows, layer in places)
    num_bytes = export.write_file(folder / WEIGHTS_FILE, shapes, arrays, dtype)
    stated = _config(modules, adapters, leaves, base)
    write_whole(folder / ADAPTERS_FILE, json.dumps(stated, indent=2) + "\n")
    foreign.record_written(stated)
    return num_bytes


def _adapted_paths(rows: Sequence[Weight], leaves: Mapping[str, jax.Array]) -> list[Weight]:
    return [row for row in rows if f"{row.path}{A}" in leaves]


def _names(tensor: str) -> list[str]:
    module = _PREFIX + tensor.removesuffix(".weight")
    return [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]


def _shapes(rows: Sequence[Weight], leaves: Mapping[str, jax.Array]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of lora_A [rank, inputs] and lora_B [outputs, rank] for one tensor of a layer.

    Args:
      rows: all matrices in the tensor: rows of the table `names.weights`.
      leaves: path -> parameter.
    """
    own = _adapted_paths(rows, leaves)
    a, b = (leaves[f"{own[0].path}{end}"].shape for end in (A, B))
    rank = len(own) * b[1]
    return (rank, math.prod(a[1:-1])), (sum(_num_outputs(row, leaves) for row in rows), rank)


def _num_outputs(row: Weight, leaves: Mapping[str, jax.Array]) -> int:
    """Returns the number of outputs of a matrix.

    It is the size of the matrix's lora_B in `leaves` (path -> parameter). If the matrix has no adapter, it is computed
    from the shape of its weight [L, D, ...].
    """
    path = f"{row.path}{B}" if f"{row.path}{B}" in leaves else row.path
    return math.prod(leaves[path].shape[2:])


def _factors(rows: Sequence[Weight], leaves: Mapping[str, jax.Array], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns lora_A and lora_B of a tensor in one layer, float32, joined from the factors of the tensor's matrices.

    Args:
      rows: all matrices in the tensor: rows of the table `names.weights`.
      leaves: path -> parameter.
      layer: the index of the layer.
    """
    of_a, of_b = (np.zeros(shape, np.float32) for shape in _shapes(rows, leaves))
    own = _adapted_paths(rows, leaves)
    for index, row in enumerate(own):
        a, b = (export.on_host(leaves[f"{row.path}{end}"], layer) for end in (A, B))
        rank, begin = len(b), sum(_num_outputs(one, leaves) for one in rows[: rows.index(row)])
        ranks = slice(index * rank, (index + 1) * rank)
        of_a[ranks] = a.reshape(-1, rank).T
        of_b[begin : begin + b[0].size, ranks] = b.reshape(rank, -1).T
    return of_a, of_b


def _is_transposed(row: Weight) -> bool:
    """Returns whether the files store a matrix as [inputs, outputs], as in GPT-2, instead of [outputs, inputs]."""
    return re.findall(r"\w", row.stored)[0] == row.layout[0]


def _config(
    modules: Sequence[Sequence[Weight]], adapters: LoraOptions, leaves: Mapping[str, jax.Array], base: str | None
) -> JsonObject:
    """Returns the content of adapter_config.json.

    Args:
      modules: for each adapted tensor, all its matrices: rows of the table `names.weights`.
      adapters: the LoRA options of the run.
      leaves: path -> parameter.
      base: the path of the base model; None if the base model is not a Hugging Face folder.
    """
    named = {
        rows[0].name.partition("{}.")[2].removesuffix(".weight"): len(_adapted_paths(rows, leaves)) for rows in modules
    }
    alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
    power = 0.5 if adapters.rank_stabilized else 1
    is_transposed = [_is_transposed(row) for rows in modules for row in rows]
    assert len(set(is_transposed)) == 1, "all matrices of a family have the same order of dims"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        # Joined matrices have a larger rank; their alpha grows with it, so that the scale remains the same.
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
