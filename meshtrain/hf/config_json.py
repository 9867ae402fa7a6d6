"""Reads a Hugging Face config.json as options of the decoder.

An unknown key is an error, since it may change the results. `families.py` lists the families and their keys;
`positions.py` contains the rules for RoPE and windows.
"""

import contextlib
import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain import options
from meshtrain.cli import flags
from meshtrain.data.encoding.tokenizer_folder import TOKENIZER
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.files import Json, JsonObject, expand_user, pointer_problem, read_json, what_is_at
from meshtrain.hf import names, positions, tensor_files
from meshtrain.hf.families import DIFFERENT, FAMILIES, HARMLESS, OF_IMAGES, ONLY, WITH_IMAGES, Family
from meshtrain.hf.values import NO_WAY, PUBLISHED, UNQUANTIZED, refusal, take, text_of
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.options import Options, Value, Values

CONFIG_FILE = "config.json"
QUANTIZED = "quantization_config"
TIED = "tie_word_embeddings"
_DEFAULTS = DecoderOptions()
_MOST_DIFFERING, _LONGEST_KIND = 6, 100  # keys in a line, characters of a model_type
# Sizes for which 0 means "none" in the decoder, but that must be at least 1 in a family that has the key.
_NEEDED = ("vocab_size", "moe.num_experts", "latent.dim")
ADAPTERS_FILE = "adapter_config.json"  # replaces config.json in a folder that contains only adapters
# Options that a user may choose freely: the weights remain valid for every value.
_FREE = (
    "vocab_multiple", "dropout_rate", "init_std", "attention", "within_documents", "loss_chunk", "moe.balance_weight",
    "moe.z_weight",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Described:
    """A description of a model: the decoder options and other facts, read from its config.json.

    Attributes:
      family: the `model_type`, a key of `FAMILIES`.
      options: the options of the decoder.
      max_length: the maximum number of tokens of a text; 0 if config.json does not state it.
      dtype: the dtype of the weights that config.json states, such as `bfloat16`; `bfloat16` if it states only a
        quantization; '' if it states neither.
      separate_head: the name of an output-head tensor that differs from the embedding table although config.json ties
        them; `options` are then untied, as in transformers. '' if there is no such tensor.
      is_unquantized: whether all tensors have float dtypes although config.json states a quantization.
    """

    family: str
    options: DecoderOptions
    max_length: int
    dtype: str
    separate_head: str = ""
    is_unquantized: bool = False


def is_described(directory: str | Path) -> bool:
    """Returns whether a folder contains a Hugging Face model, and is not the workdir of a meshtrain run.

    The config.json of a model has the key `model_type` or `architectures`. If config.json cannot be read, a folder with
    safetensors files is a model.
    """
    folder = expand_user(directory)
    if what_is_at(folder) != "a folder" or what_is_at(folder / "checkpoints") == "a folder":
        return False
    try:
        given = _load(folder / CONFIG_FILE)
    except UserError:
        return any(folder.glob("*.safetensors"))
    return "model_type" in given or "architectures" in given


def is_decoder(model: Options) -> bool:
    """Returns whether model options belong to the decoder; all supported Hugging Face families are decoders."""
    return isinstance(model, DecoderOptions)


def describe_model(directory: str | Path, ignore: str | None = "") -> Described:
    """Returns a description of the model in a folder, such as its family and decoder options, from its config.json.

    The tensor files take precedence in two cases. The embeddings are untied if the files have a separate output head
    with other values. A quantization is ignored if no tensor is quantized.

    Args:
      directory: the path of the folder.
      ignore: unknown keys of config.json to ignore, comma separated, as in `init_ignore`; None ignores all unknown keys
        (for a folder that was checked before).

    Raises:
      UserError: one line for each key that is missing, wrong or unknown.
    """
    path = expand_user(directory) / CONFIG_FILE
    given = _load(path)
    plain = {key: value for key, value in given.items() if key != QUANTIZED}
    if given.get(QUANTIZED) and _has_plain_tensors(path.parent, plain):
        return dataclasses.replace(_untie(path.parent, of_json(plain, path, ignore)), is_unquantized=True)
    return _untie(path.parent, of_json(given, path, ignore))


def _has_plain_tensors(folder: Path, given: Mapping[str, Json]) -> bool:
    """Returns whether a folder's files contain exactly the tensors of the model, all in float dtypes.

    Args:
      folder: the path of the folder.
      given: the content of its config.json, without the quantization.
    """
    try:
        model = of_json(given, folder / CONFIG_FILE, None)
    except UserError:
        return False  # the caller parses the file again and reports its problems
    stored, problems = tensor_files.tensors(folder)
    size, table = names.sizes(model.options), names.as_in_files(names.weights(model.family, model.options), stored)
    used = {name for name in stored if not names.is_ignored(name, model.options)}
    num_wanted = sum(math.prod(names.stack(rows[0], size)) for rows in names.by_tensor(table))
    if problems or num_wanted != len(used) or any(weight.is_packed for weight in table):
        return False
    wanted = {name for weight in table for name in names.tensor_shapes(weight, size)}
    return wanted == used and not tensor_files.unreadable({name: stored[name] for name in used})


def _untie(folder: Path, model: Described) -> Described:
    """Returns the model with untied embeddings if the folder's files have a separate output head."""
    if not model.options.tied_embeddings or not (head := _separate_head(folder, model)):
        return model
    return dataclasses.replace(
        model, options=dataclasses.replace(model.options, tied_embeddings=False), separate_head=head
    )


def _separate_head(folder: Path, model: Described) -> str:
    """Returns the name of an output head whose values differ from the embedding table, or ''."""
    stored, problems = tensor_files.tensors(folder)
    table, head = names.table_and_head(model.family, model.options, stored)
    if problems or not {table, head} <= stored.keys() or tensor_files.same_values(stored[head], stored[table]):
        return ""
    return head


def notes(directory: str | Path, model: Described) -> list[str]:
    """Returns the warnings about contradictions between a folder's config.json and its tensor files.

    config.json may tie the embeddings although there is a separate output head, or state a quantization although no
    tensor is quantized. In both cases, the tensor files take precedence.
    """
    lines = []
    if model.separate_head:
        lines.append(
            f"{directory}: {CONFIG_FILE} has {TIED}=true, but {model.separate_head} differs from the "
            "embedding table; it is used as a separate output head, as in transformers"
        )
    if model.is_unquantized:
        lines.append(f"{directory}: {CONFIG_FILE} has {QUANTIZED}, but no tensor is quantized; this key is ignored")
    return lines


def config_of_text(directory: str | Path) -> JsonObject:
    """Returns the content of a folder's config.json; for a multimodal model, only the keys of its text model.

    Raises:
      UserError: config.json is missing, or is not a JSON object.
    """
    return _text_half(_load(expand_user(directory) / CONFIG_FILE))


def has_images(directory: str | Path) -> bool:
    """Returns whether a folder's model is multimodal (text and images)."""
    return _load(expand_user(directory) / CONFIG_FILE).get("model_type") in WITH_IMAGES


def _text_half(given: JsonObject) -> JsonObject:
    """Returns the content of a config.json for only the text model; unchanged if the model is not multimodal.

    Keys that `text_config` lacks get the defaults of the multimodal family.
    """
    kind, text = given.get("model_type"), given.get("text_config") or {}
    if not isinstance(kind, str) or kind not in WITH_IMAGES or not isinstance(text, dict):
        return given
    row, has_ropes = WITH_IMAGES[kind], text.get("rope_parameters") is not None
    found: JsonObject = {"architectures": [FAMILIES[row.text].architecture], "model_type": row.text}
    found |= {key: value for key, value in given.items() if key not in OF_IMAGES}
    found |= {key: value for key, value in row.absent.items() if not (has_ropes and key.startswith("rope_"))} | text
    # The outer object may untie the output head although `text_config` does not mention it.
    return found | ({TIED: False} if given.get(TIED) is False else {})


def of_json(given: Mapping[str, Json], path: Path, ignore: str | None) -> Described:
    """Returns a description of a model, such as its family and decoder options, from the content of a config.json.

    Args:
      given: the content.
      path: the path of the file, for error lines.
      ignore: unknown keys to ignore, comma separated; None ignores all unknown keys.

    Raises:
      UserError: one line for each key that is missing, wrong or unknown.
    """
    given = _text_half(dict(given))
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        # Programs write this key, so only case and punctuation may be mistyped; any other difference is another model.
        letters = re.sub(r"[\W_]", "", str(kind)).lower()
        fix = next((f"; did you mean '{name}'?" for name in FAMILIES if name.replace("_", "") == letters), "")
        alike = "" if fix else f" ({_most_alike(given, str(kind))})"
        allowed = ", ".join((*FAMILIES, *WITH_IMAGES))
        problem = Problem("model_type", got=text_of(str(kind)), allowed=f"{allowed}{alike}", fix=fix, nearest=NO_WAY)
        raise UserError(problem.at(path))
    given, found = _canonical_names(given, FAMILIES[kind])
    fields, problems = _fields(given, FAMILIES[kind])
    found += problems + _unsupported_keys(given, kind) + ([] if ignore is None else _strange(given, ignore))
    length, wrong = _length(given, FAMILIES[kind].length)
    found += wrong
    for part in (positions.rotary(given, kind), positions.windows(given, kind)):
        fields |= part[0]
        found += part[1]
    if not found:
        shape = flags.construct(_DEFAULTS, flags.flatten(_DEFAULTS) | fields)
        keys = positions.KEYS | {name: key for key, name in FAMILIES[kind].fields.items()}
        found += [
            problem.with_parts(key=keys.get(problem.key) or problem.key, nearest=PUBLISHED)
            for problem in options.problems(shape, "")
        ]
        found = found or _contradictions(shape, FAMILIES[kind])  # last, since it divides by sizes
    refuse(problem.at(path) for problem in found)
    dtype = given.get("dtype") or given.get("torch_dtype") or ("bfloat16" if given.get(QUANTIZED) else None)
    return Described(kind, shape, length, dtype if isinstance(dtype, str) else "")


def _most_alike(given: Mapping[str, Json], kind: str) -> str:
    """Returns a text for an error: the two families most similar to an unknown model, and the keys that differ.

    The keys are the keys of the model that the most similar family does not support.

    Args:
      given: the content of the model's config.json.
      kind: its `model_type`.
    """
    differing = {family: _differing_keys(given, family) for family in FAMILIES}

    def order(family: str) -> tuple[int, float]:
        return len(differing[family]), -difflib.SequenceMatcher(None, family, kind[:_LONGEST_KIND]).ratio()

    first, second = sorted(FAMILIES, key=order)[:2]
    texts = [f"{key} ({what})" for key, what in differing[first].items()]
    more = f" and {len(texts) - _MOST_DIFFERING} more" if len(texts) > _MOST_DIFFERING else ""
    differences = f"; keys that differ from {first}: {', '.join(texts[:_MOST_DIFFERING])}{more}" if texts else ""
    return f"the most similar families are {first} and {second}{differences}"


def _differing_keys(given: Mapping[str, Json], kind: str) -> dict[str, str]:
    """Returns the keys of a config.json that a family does not support: key -> the part of the model that it changes.

    The part is `attention`, `activations`, `tensors` or `unknown`. The result is {} if `given` describes no text model:
    it has only `model_type` and keys of image models.

    Args:
      given: the content of config.json.
      kind: the family, a key of `FAMILIES`.
    """
    if given.keys() <= {"model_type", *OF_IMAGES}:
        return {}  # nothing to compare
    renamed, _ = _canonical_names(given, FAMILIES[kind])
    problems = [
        *positions.rotary(renamed, kind)[1],
        *positions.windows(renamed, kind)[1],
        *_unsupported_keys(renamed, kind),
    ]
    problems += [problem for problem in _fields(renamed, FAMILIES[kind])[1] if problem.got == "nothing"]
    differing = [problem.key.partition(".")[0] for problem in problems]
    keys = [key for key in differing if key not in ("architectures", "auto_map")]
    known = {key: DIFFERENT[key] if key in DIFFERENT else "attention" for key in keys}
    return known | dict.fromkeys(in_no_table(given), "unknown")


def _length(given: Mapping[str, Json], key: str) -> tuple[int, list[Problem]]:
    """Returns the maximum length in tokens at a key (0 if absent or invalid), and an error line if it is invalid."""
    if given.get(key) is None:
        return 0, []
    with contextlib.suppress(ValueError):
        length = int(flags.convert(given[key], int))
        if 1 <= length <= options.MOST[int]:
            return length, []
    return 0, [refusal(key, given[key], f"a whole number from 1 to {options.MOST[int]}", PUBLISHED)]


def differences(
    ours: DecoderOptions, theirs: DecoderOptions, sequence_length: int, directory: str | Path
) -> list[Problem]:
    """Returns an error line for each option of a run that differs from a folder's model and changes the results.

    Args:
      ours: the decoder options of the run.
      theirs: the decoder options of the folder.
      sequence_length: the sequence length of the run in tokens, which sets the number of learned positions if the
        option `max_positions` is 0.
      directory: the path of the folder, for error lines.
    """
    return [
        Problem(
            f"model.{name}",
            got=f"{own}, but the model in {directory} has {wanted}",
            allowed=wanted,
            nearest=f"model.{name}={wanted}, which `python -m meshtrain hf config {directory}` prints",
        )
        for name, (own, wanted) in differing(ours, theirs, sequence_length).items()
    ]


def differing(ours: DecoderOptions, theirs: DecoderOptions, sequence_length: int) -> dict[str, tuple[Value, Value]]:
    """Returns the differing options with which the same weights give other results: key -> (our value, their value).

    Args:
      ours: decoder options.
      theirs: the decoder options to compare with.
      sequence_length: the sequence length of training in tokens, which sets the number of learned positions if the
        option `max_positions` is 0.
    """
    idle = options.unused(ours, "").keys() & options.unused(theirs, "")
    names = [name for name in flags.flatten(_DEFAULTS) if name not in (*_FREE, *idle)]
    both = {name: tuple(_effective(shape, name, sequence_length) for shape in (ours, theirs)) for name in names}
    return {name: (own, wanted) for name, (own, wanted) in both.items() if own != wanted}


def _effective(shape: DecoderOptions, name: str, sequence_length: int) -> Value:
    # A value that means "derived from other options" is replaced by the derived value.
    if name == "head_dim":
        return shape.width_of_head
    if name == "latent.value_dim":
        return shape.width_of_values
    if name == "attention_scalar":
        return shape.attention_scalar or shape.width_of_head
    if name == "rope.local_base" and shape.rope.factor == 1.0:
        return shape.rope.local_base or shape.rope.base
    if name == "window":
        return shape.window if shape.num_global < shape.num_layers else 0
    if name == "global_every":
        return shape.global_every if 0 < shape.num_global < shape.num_layers else 0
    if name == "max_positions":
        return (shape.max_positions or sequence_length) if shape.positions == "learned" else 0
    return operator.attrgetter(name)(shape)


def _load(path: Path) -> JsonObject:
    """Reads the JSON object in a config.json.

    Raises:
      UserError: the file is missing or is not a JSON object; or the folder contains only adapters.
    """
    if (what := what_is_at(path)) != "a file":
        if what_is_at(path.with_name(ADAPTERS_FILE)) == "a file":
            raise UserError(
                Problem(
                    path.parent,
                    got="peft adapters without their base model",
                    allowed=f"a folder with {CONFIG_FILE}",
                    nearest=f"--config.init_from={path.parent} of train",
                )
            )
        raise UserError(Problem(path, got=what, allowed="a file", nearest=PUBLISHED))
    try:
        given = read_json(path.read_text(encoding="utf-8"))
        if isinstance(given, dict):
            return given
        raise ValueError(f"it contains {type(given).__name__}")
    except (OSError, ValueError) as error:
        if line := pointer_problem(path):
            raise UserError(line) from error
        raise UserError(
            Problem(path, fault=f"not read ({error})", allowed="a JSON object", nearest=PUBLISHED)
        ) from error


def _canonical_names(given: Mapping[str, Json], family: Family) -> tuple[JsonObject, list[Problem]]:
    """Renames each key that has two names in published files to the name in `family.fields`.

    Returns:
      The content of config.json with renamed keys, and an error line for each key with two different values.
    """
    renamed, problems = dict(given), list[Problem]()
    for key, other in family.same.items():
        value = renamed.pop(other, None)
        if value is not None and renamed.setdefault(key, value) != value:
            problems.append(
                Problem(
                    other,
                    got=f"{text_of(value)}, but {key} has {text_of(renamed[key])}",
                    allowed="the same",
                    nearest=PUBLISHED,
                )
            )
    return renamed, problems


def _fields(given: Mapping[str, Json], family: Family) -> tuple[Values, list[Problem]]:
    """Returns the decoder options (dotted name -> value) in a family's keys, and an error line for each bad key.

    A key is bad if it is required and missing, or if its value is invalid.
    """
    fields, problems = dict(family.fixed), list[Problem]()
    for key, name in family.fields.items():
        value = given.get(key)
        if value is None and key in given and key in family.off:
            continue
        if value is None and key in family.absent:
            value = family.absent[key]
            if value is None:
                continue
        take(fields, problems, name, key, value)
    if "num_kv_heads" not in fields and "num_heads" in fields:
        fields["num_kv_heads"] = fields["num_heads"]
    if "mlp_dim" not in fields and "embed_dim" in fields:
        fields["mlp_dim"] = 4 * fields["embed_dim"]
    return fields, problems


def _unsupported_keys(given: Mapping[str, Json], kind: str) -> list[Problem]:
    """Returns an error line for each key of config.json that changes the results and has an unsupported value.

    Args:
      given: the content of config.json.
      kind: the family, a key of `FAMILIES`.
    """
    family = FAMILIES[kind]
    understood = {*family.fields, *family.idle, *positions.keys(kind)}
    only = {**ONLY, **family.only, **dict([family.activation]), "architectures": ([family.architecture],)}
    problems = []
    unsaid = {key: family.absent[key] for key in family.only if key in family.absent and key not in given}
    for key, value in {**given, **unsaid}.items():
        if value is None or key in understood or key not in DIFFERENT:
            continue
        if key == QUANTIZED and isinstance(value, dict) and value.get("quant_method") in family.packed:
            continue
        legal: Sequence[Json] = only[key] if key in only else family.packed if key == QUANTIZED else ()
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in legal):
            allowed = ", ".join(map(str, legal)) or f"keys that meshtrain understands in a {kind}"
            fix = UNQUANTIZED if key == QUANTIZED else f"{NO_WAY}: {DIFFERENT[key]} would differ"
            problems.append(refusal(key, value, allowed, fix))
    return problems


def in_no_table(given: Mapping[str, Json]) -> list[str]:
    """Returns the keys of a config.json that no table lists: it is unknown whether they change the results."""
    known = HARMLESS | DIFFERENT.keys()
    return [key for key in given if given[key] is not None and not (key in known or key.startswith("unsloth_"))]


def _strange(given: Mapping[str, Json], ignore: str) -> list[Problem]:
    """Returns an error line for each unknown key that is not in `ignore`, and for each known key in `ignore`.

    Args:
      given: the content of config.json.
      ignore: the keys that the user wants to ignore, comma separated. It may also contain `tokenizer.json`, which is no
        key and causes no error here.
    """
    strange, ignored = in_no_table(given), [key.strip() for key in ignore.split(",") if key.strip()]
    why = "keys that meshtrain understands; the effect of this key is unknown"
    fix = f"--config.init_ignore={','.join(strange)}"
    problems = [refusal(key, given[key], why, fix) for key in strange if key not in ignored]
    for key in ignored:
        if key not in (*strange, TOKENIZER):
            problems.append(
                Problem(
                    "init_ignore",
                    got=f"'{key}'",
                    allowed=f"keys that meshtrain does not know, here {', '.join(strange) or 'none'}, and {TOKENIZER}",
                    nearest="leave it out",
                )
            )
    return problems


def _contradictions(shape: DecoderOptions, family: Family) -> list[Problem]:
    """Returns an error line for each required size that is 0, and for each impossible combination of decoder options.

    `shape` contains the decoder options that config.json states.
    """
    sizes = flags.flatten(shape)
    needed = {key: name for key, name in family.fields.items() if name in _NEEDED and not sizes[name]}
    found = [Problem(key, got=0, allowed="at least 1", nearest=PUBLISHED) for key in needed]
    if shape.num_dense >= shape.num_layers:
        found.append(
            Problem(
                "first_k_dense_replace",
                got=shape.num_dense,
                allowed=f"fewer than the {shape.num_layers} layers",
                nearest=PUBLISHED,
            )
        )
    if shape.num_heads % shape.num_kv_heads:
        found.append(
            Problem(
                "num_key_value_heads",
                got=shape.num_kv_heads,
                allowed=f"a divisor of the {shape.num_heads} heads",
                nearest=PUBLISHED,
            )
        )
    if not shape.head_dim and shape.embed_dim % shape.num_heads:
        found.append(
            Problem(
                "head_dim",
                got=f"nothing, but {shape.num_heads} heads do not divide a width of {shape.embed_dim}",
                allowed="a whole number",
                nearest=PUBLISHED,
            )
        )
    if shape.positions == "rotary" and shape.width_of_head % 2:
        found.append(Problem("head_dim", got=shape.width_of_head, allowed="an even number", nearest=PUBLISHED))
    scaling = shape.rope.frequency_scaling
    if scaling and scaling.kind != "linear" and not scaling.high > scaling.low > 0:
        low, high = (key for key, name in positions.SCALINGS[scaling.kind].items() if name in ("rope.low", "rope.high"))
        found.append(
            Problem(
                f"rope_parameters.{high}",
                got=scaling.high,
                allowed=f"above {low}={scaling.low}, which must be above 0",
                nearest=PUBLISHED,
            )
        )
    if shape.moe.experts_per_token > shape.moe.num_experts > 0:
        found.append(
            Problem(
                "num_experts_per_tok",
                got=shape.moe.experts_per_token,
                allowed=f"at most the {shape.moe.num_experts} experts",
                nearest=PUBLISHED,
            )
        )
    return found
