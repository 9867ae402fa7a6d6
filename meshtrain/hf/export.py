"""Writes weights and options as a Hugging Face folder: config.json, safetensors files, their index, tokenizer files."""

import json
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from meshtrain.data.encoding.tokenizer_folder import SETTINGS, TEMPLATE, TOKENIZER, settings
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
# If the class is missing, transformers uses the class of the model, which adds special tokens.
_PLAIN_SETTINGS: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# Files that are copied unchanged; all except the first belong to the tokenizer.
COPIED = (
    GENERATION_FILE, TOKENIZER, SETTINGS, TEMPLATE, _TOKENS_MAP, "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model",
)  # fmt: skip
END_TOKEN = "<|endoftext|>"  # the end of a document, for the byte tokenizer
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FILE_BYTES = 5_000_000_000  # maximum bytes of tensors in a file, unless a single tensor is larger
_ALIGNED = 8


class Tensor(NamedTuple):
    """A description of a tensor in the exported files: its name, its shape, and the weights that it contains.

    Attributes:
      name: the tensor's name in Hugging Face's files.
      shape: the tensor's shape in the file.
      rows: the decoder's weights that this tensor contains, ordered by `Weight.part`: rows of the table
        `names.weights`.
      place: (layer, expert) indices if each expert has a separate tensor; otherwise (layer,), or () for a weight
        outside of layers.
    """

    name: str
    shape: tuple[int, ...]
    rows: Sequence[Weight]
    place: tuple[int, ...]


def tensors(family: str, options: DecoderOptions) -> list[Tensor]:
    """Returns descriptions of all tensors of an exported model, without values, in the order of the files.

    Args:
      family: the Hugging Face `model_type`, a key of `families.FAMILIES`.
      options: the options of the decoder.
    """
    size, result = names.sizes(options), []
    for rows in names.by_tensor(names.weights(family, options)):
        shape = names.shape_in_file(rows[0], size)
        for place in np.ndindex(*names.stack(rows[0], size)):
            result.append(Tensor(names.tensor_name(rows[0], place, size), shape, rows, place))
    return result


def write_weights(
    folder: Path, family: str, options: DecoderOptions, params: Params, dtype: str, adapters: lora.LoraOptions
) -> int:
    """Writes the safetensors files and their index, and returns the number of bytes of the tensors.

    Adapters are merged into their matrices in float32, before the values are rounded. Tensors are merged and copied to
    the host layer by layer. Every array must be addressable by this process.

    Args:
      folder: an existing folder.
      family: a key of `families.FAMILIES`.
      options: the options of the decoder.
      params: the parameters, without Flax's boxes. Stacked layers are in layer order, not grouped by pipeline stage.
      dtype: a key of `DTYPES`; values are rounded to it.
      adapters: the LoRA options of the run.
    """
    leaves, size = dict(leaves_with_paths(params)), names.sizes(options)
    groups = _in_files(tensors(family, options), tensor_files.READABLE[DTYPES[dtype]].itemsize)

    def stored(tensor: Tensor) -> np.ndarray:
        own = [_merge_adapter(leaves, row.path, tensor.place, adapters) for row in tensor.rows]
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
      folder: an existing folder.
      config: the content of config.json, from `config_export.as_json`.
      original: the folder that the model was imported from, whose generation_config.json is copied; None if the model
        was not imported.
      of_text: the folder whose tokenizer and chat template are copied; None: no tokenizer is copied.
      written: name -> content of additional files; they replace copied files of the same name.
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
    """Returns name -> content of the files that record the run's special tokens; they replace the copied files.

    Args:
      ids: `eos_token_id` and other ids of special tokens, as in config.json. If it is empty, the result does not
        contain generation_config.json.
      chosen: new values of the tokenizer's settings, such as `eos_token`; None removes a setting. Empty: the files
        of settings are not in the result.
      original: the folder that the model was imported from; None if the model was not imported.
      of_text: the folder whose tokenizer is copied; None: the tokenizer is a single file, without settings.
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
    """Returns name -> content of the tokenizer files of the byte tokenizer."""
    content = _PLAIN_SETTINGS | {"eos_token": END_TOKEN}
    return {TOKENIZER: byte_tokenizer(), SETTINGS: json.dumps(content, indent=2) + "\n"}


def byte_tokenizer() -> str:
    """Returns a tokenizer.json with the ids of the byte tokenizer: UTF-8 bytes, and 256 for the end of a document."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # The alphabet of byte-level BPE: printable Latin-1 bytes map to themselves, other bytes to 256 and up, in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN])
    return str(tokenizer.to_str(pretty=False))


def _in_files(tensors: Sequence[Tensor], item_bytes: int) -> list[list[Tensor]]:
    """Groups tensors, in their order, into files of at most 5 GB; a larger tensor gets a separate file.

    Args:
      tensors: descriptions of the tensors.
      item_bytes: bytes of one element in the file.
    """
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
    """Writes a safetensors file tensor by tensor, and returns the number of bytes of the tensors.

    The safetensors library would need all tensors of the file in memory at once.

    Args:
      path: the file; an existing file is replaced.
      shapes: name -> shape of each tensor.
      arrays: the tensors in the order of `shapes`; each is requested when the previous tensor is written.
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
    """Returns a numpy copy of an array, or of its slice at `index`: (layer,) or (layer, expert)."""
    return np.asarray(_part(leaf, index))


def _part(leaf: jax.Array, index: Sequence[int]) -> jax.Array:
    # The indices are operands rather than constants, so one compiled program works for all layers and experts.
    for place in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, np.int32(place), keepdims=False)
    return leaf


def _merge_adapter(
    leaves: Mapping[str, jax.Array], path: str, index: Sequence[int], adapters: lora.LoraOptions
) -> np.ndarray:
    """Returns a weight on the host, with its adapter merged into it if it has one.

    Args:
      leaves: path -> parameter.
      path: the path of the weight.
      index: the (layer, expert) or (layer,) index of the slice to return; () returns the complete weight.
      adapters: the LoRA options of the run.
    """
    if f"{path}{A}" not in leaves:
        return on_host(leaves[path], *index)
    own = {f"weight{end}": _part(leaves[f"{path}{end}"], index) for end in ("", A, B)}
    return np.asarray(lora.merge_adapters(own, adapters)["weight"])
