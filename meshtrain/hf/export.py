"""Weights and options -> a Hugging Face folder: config.json, safetensors files with their index, tokenizer files."""

import json
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from meshtrain.data.tokenizer import SETTINGS, TEMPLATE, TOKENIZER, settings
from meshtrain.files import Json, JsonObject, replacing, write_whole
from meshtrain.hf import names, tensor_files
from meshtrain.hf.config_json import CONFIG_FILE
from meshtrain.hf.names import Weight
from meshtrain.models import lora
from meshtrain.models.layers import A, B
from meshtrain.models.task import Params
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.trees import leaves_with_paths

GENERATION_FILE = "generation_config.json"
_TOKENS_MAP = "special_tokens_map.json"
# Without its class named, readers take the model's own, which adds tokens.
_PLAIN_SETTINGS: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# Files beside the weights that are copied as they are; all but the first belong to text.
COPIED = (
    GENERATION_FILE, TOKENIZER, SETTINGS, TEMPLATE, _TOKENS_MAP, "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model",
)  # fmt: skip
END_TOKEN = "<|endoftext|>"  # of the byte tokenizer
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FILE_BYTES = 5_000_000_000  # most in a file, unless one tensor has more
_ALIGNED = 8


class Tensor(NamedTuple):
    """A tensor to be written.

    Attributes:
      name: theirs.
      shape: in the file.
      rows: the weights that it holds, by `part`.
      place: index of the layer, and of the expert where each has its own tensor; empty for a weight of no layer.
    """

    name: str
    shape: tuple[int, ...]
    rows: Sequence[Weight]
    place: tuple[int, ...]


def tensors(family: str, options: DecoderOptions) -> list[Tensor]:
    """Returns the tensors of a model in the order in which they are written."""
    size, result = names.sizes(options), []
    for rows in names.by_tensor(names.weights(family, options)):
        shape = names.stored_shape(rows[0], size)
        for place in np.ndindex(*names.stack(rows[0], size)):
            result.append(Tensor(names.tensor_name(rows[0], place, size), shape, rows, place))
    return result


def write_weights(
    folder: Path, family: str, options: DecoderOptions, params: Params, dtype: str, adapters: lora.LoraOptions
) -> int:
    """Writes the safetensors files and their index, and returns the bytes of the tensors.

    Adapters are merged into their matrices in float32, before the values are rounded. One layer's tensor at a time is
    merged and on the host. Every array has to be addressable by this process.

    Args:
      folder: that exists.
      family: a key of `config.FAMILIES`.
      options: of the decoder.
      params: with layers in layer order, unboxed.
      dtype: a key of `DTYPES`; values are rounded to it.
      adapters: with which the run was trained.
    """
    leaves, size = dict(leaves_with_paths(params)), names.sizes(options)
    groups = _in_files(tensors(family, options), tensor_files.READABLE[DTYPES[dtype]].itemsize)

    def stored(tensor: Tensor) -> np.ndarray:
        own = [_merged(leaves, row.path, tensor.place, adapters) for row in tensor.rows]
        return np.asarray(names.as_stored(own, tensor.rows, size))

    placed, total = dict[str, str](), 0
    for number, group in enumerate(groups, start=1):
        one = len(groups) == 1
        file = tensor_files.ONE_FILE if one else f"model-{number:05}-of-{len(groups):05}.safetensors"
        total += write_file(folder / file, {one.name: one.shape for one in group}, map(stored, group), dtype)
        placed |= {tensor.name: file for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    write_whole(folder / tensor_files.INDEX_FILE, json.dumps(index, indent=2) + "\n")
    return total


def write_rest(
    folder: Path, config: Mapping[str, Json], original: Path | None, of_text: Path | None, written: Mapping[str, str]
) -> None:
    """Writes config.json, generation_config.json and the files of the tokenizer.

    Args:
      folder: that exists.
      config: from `stating.as_json`.
      original: the folder with the files that came with the model; None: there is none.
      of_text: the folder whose tokenizer and chat template are copied; None: there is none.
      written: name -> content of files that are written besides, or in place of copies.
    """
    write_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    for name in COPIED:
        source = original if name == GENERATION_FILE else of_text
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name, content in written.items():
        write_whole(folder / name, content)
    if not (folder / GENERATION_FILE).exists():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
        write_whole(folder / GENERATION_FILE, json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n")


def special_token_files(
    ids: Mapping[str, Json], chosen: Mapping[str, Json], original: Path | None, of_text: Path | None
) -> dict[str, str]:
    """Returns name -> content of the files that record the special tokens of a run in place of the copied ones.

    Args:
      ids: `eos_token_id` and other ids of special tokens, as in config.json; empty: those of `original`.
      chosen: what the tokenizer's settings get, such as `eos_token`; empty: they stay.
      original: the folder that the model came from; None: there is none.
      of_text: the folder whose tokenizer is copied; None: only its file is.
    """
    files = dict[str, JsonObject]()
    if ids:
        files[GENERATION_FILE] = {} if original is None else settings(str(original), GENERATION_FILE)
        files[GENERATION_FILE] = (files[GENERATION_FILE] or {"_from_model_config": True}) | dict(ids)
    if chosen:
        for name in (SETTINGS, _TOKENS_MAP):
            given = _PLAIN_SETTINGS if of_text is None else settings(str(of_text), name)
            if given and (of_text or name == SETTINGS):
                names = [key for key in chosen if name == SETTINGS or (key.endswith("_token") and key in given)]
                files[name] = given | {key: chosen[key] for key in names}
    return {
        name: json.dumps({key: value for key, value in content.items() if value is not None}, indent=2) + "\n"
        for name, content in files.items()
    }


def byte_files() -> dict[str, str]:
    """Returns name -> content of the files of the byte tokenizer's folder."""
    content = _PLAIN_SETTINGS | {"eos_token": END_TOKEN}
    return {TOKENIZER: byte_tokenizer(), SETTINGS: json.dumps(content, indent=2) + "\n"}


def byte_tokenizer() -> str:
    """Returns a tokenizer.json with the ids of the byte tokenizer: UTF-8 bytes, and 256 for the end of a document."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # The alphabet stands for bytes: printable Latin-1 for themselves, the others from 256 on, in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN])
    return str(tokenizer.to_str(pretty=False))


def _in_files(tensors: Sequence[Tensor], item_bytes: int) -> list[list[Tensor]]:
    """Returns the tensors of each file."""
    groups: list[list[Tensor]] = [[]]
    room = _FILE_BYTES
    for tensor in tensors:
        size = int(np.prod(tensor.shape)) * item_bytes
        if size > room and groups[-1]:
            groups.append([])
            room = _FILE_BYTES
        groups[-1].append(tensor)
        room -= size
    return groups


def write_file(path: Path, shapes: Mapping[str, Sequence[int]], arrays: Iterable[np.ndarray], dtype: str) -> int:
    """Writes a safetensors file, tensor by tensor, and returns the bytes of the tensors.

    The format's library would hold all of the file's tensors in memory at once.

    Args:
      path: of the file, which is replaced.
      shapes: name -> shape of each tensor.
      arrays: the tensors in this order; the next one is taken when the one before it is written.
      dtype: a key of `DTYPES`; values are rounded to it.
    """
    stated = DTYPES[dtype]
    wanted = tensor_files.READABLE[stated]
    header: JsonObject = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * wanted.itemsize
        header[name] = {"dtype": stated, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    not_finite = []
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, array in zip(shapes, arrays, strict=True):
            with np.errstate(over="ignore"):  # the warning below names the tensor
                rounded = np.ascontiguousarray(array.astype(wanted))
            if not tensor_files.has_only_finite(rounded):
                not_finite.append(name)
            file.write(rounded.tobytes())
    tensor_files.warn_not_finite(f"{path.name} in {dtype}", not_finite)
    return end


def on_host(leaf: jax.Array, *index: int) -> np.ndarray:
    """Returns an array, or a part of it: `index` is of the layer, and of the expert."""
    return np.asarray(_part(leaf, index))


def _part(leaf: jax.Array, index: Sequence[int]) -> jax.Array:
    # With the indices as operands, one program serves all layers and experts.
    for place in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, np.int32(place), keepdims=False)
    return leaf


def _merged(leaves: Mapping[str, jax.Array], path: str, index: Sequence[int], adapters: lora.LoraOptions) -> np.ndarray:
    """Returns a weight, or a part of it, with what its adapter adds."""
    if f"{path}{A}" not in leaves:
        return on_host(leaves[path], *index)
    own = {f"weight{end}": _part(leaves[f"{path}{end}"], index) for end in ("", A, B)}
    return np.asarray(lora.merged(own, adapters)["weight"])
