"""Reads RoPE and sliding windows of a config.json: equal in all layers, or alternating (Gemma, OLMo 3, SmolLM 3).

The rules follow the configuration classes of the package transformers (Wolf et al. 2020).
"""

from collections.abc import Mapping

from meshtrain.errors import Problem
from meshtrain.files import Json, JsonObject
from meshtrain.hf.families import FAMILIES, Family
from meshtrain.hf.values import PUBLISHED, refusal, take, text_of
from meshtrain.options import Value, Values

_ROPE_KEYS = {"rope_type": "", "rope_theta": "rope.base"}
# `rope_type` -> key of the RoPE object in config.json -> option of the decoder.
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "factor": "rope.factor",
        "low_freq_factor": "rope.low",
        "high_freq_factor": "rope.high",
        "original_max_position_embeddings": "rope.original_length",
    },
    "linear": {"factor": "rope.factor"},
    "yarn": {
        "factor": "rope.factor",
        "beta_slow": "rope.low",
        "beta_fast": "rope.high",
        "original_max_position_embeddings": "rope.original_length",
        "attention_factor": "rope.attention",
        "truncate": "rope.whole_pairs",
    },
}
_KINDS = ("default", *SCALINGS)
_YARN_ABSENT: Mapping[str, Json] = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 0.0, "truncate": True}
WINDOW_KEYS: Mapping[str, tuple[str, ...]] = {
    "mistral": ("sliding_window",),
    "mixtral": ("sliding_window",),
    "phi3": ("sliding_window",),
    "olmo3": ("sliding_window", "layer_types"),
    "gpt_oss": ("sliding_window", "layer_types"),
    "starcoder2": ("sliding_window",),
    "qwen2": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "qwen3": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "gemma2": ("sliding_window", "sliding_window_size", "layer_types"),
    "gemma3_text": ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types"),
}
WINDOWED, FULL = "sliding_attention", "full_attention"
GEMMA3, OLMO3, SMOLLM3, DEEPSEEK = "gemma3_text", "olmo3", "smollm3", "deepseek_v3"
# DeepSeek's YaRN keys for the factor of rotated queries and keys; these values are equivalent to `rope.attention` of 0.
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
IN_HALVES = (GEMMA3, OLMO3)  # families with separate RoPE settings for layers with and without a window
LOCAL_BASE = "rope_local_base_freq"
# Families in which every nth layer has full attention, and the others a window -> n if config.json does not state it.
TURNS = {"gemma2": 2, GEMMA3: 6, OLMO3: 4, "gpt_oss": 2}
UNROTATED = ("no_rope_layers", "no_rope_layer_interval")
_UNROTATED_EVERY = 4
# Option of the decoder -> its key in config.json.
KEYS = {name: key for each in (_ROPE_KEYS, *SCALINGS.values()) for key, name in each.items() if name}
KEYS |= {"window": "sliding_window", "rope.local_base": LOCAL_BASE}


def keys(kind: str) -> set[str]:
    """Returns the keys of config.json that `rotary` and `windows` read for the family `kind`."""
    result = {"layer_types", *(WINDOW_KEYS[kind] if kind in WINDOW_KEYS else ())}
    result |= {"rope_theta", "rope_scaling", "rope_parameters"} if FAMILIES[kind].is_rotary else set()
    return result | ({LOCAL_BASE} if kind == GEMMA3 else set()) | ({*UNROTATED} if kind == SMOLLM3 else set())


def rotary(given: Mapping[str, Json], kind: str) -> tuple[Values, list[Problem]]:
    """Returns the RoPE options of a family's config.json, and an error line for each problem with them.

    In files of Gemma 3 and OLMo 3, `rope_parameters` contains one object for layers with a window and one for layers
    without. In older files of Gemma 3, `rope_local_base_freq` applies to layers with a window; in older files of OLMo 3
    all layers have the same base.

    Args:
      given: the content of config.json.
      kind: a key of `FAMILIES`.
    """
    family = FAMILIES[kind]
    if kind == SMOLLM3:
        (fields, problems), (every, wrong) = _rope(given, family), _rope_interval(given)
        return fields | every, problems + wrong
    if kind == DEEPSEEK:
        return _of_latent(given, family)
    if kind not in IN_HALVES:
        return _rope(given, family)
    parameters = given.get("rope_parameters")
    halves = {WINDOWED: None, FULL: None} if parameters is None else parameters
    if not isinstance(halves, dict) or halves.keys() != {WINDOWED, FULL}:
        return {}, [refusal("rope_parameters", parameters, f"an object with {FULL} and {WINDOWED}")]
    fields, problems = _rope({**given, "rope_parameters": halves[FULL]}, family)
    problems = [_in_half(FULL, problem) for problem in problems]
    local_key = LOCAL_BASE if kind == GEMMA3 else "rope_theta"
    base = given[local_key] if local_key in given else None
    local, wrong = _rope({"rope_parameters": halves[WINDOWED], "rope_theta": base}, family)
    if "rope.factor" in local:
        wrong.append(refusal("rope_parameters.rope_type", local["rope.scaling"], "default"))
    for problem in wrong:
        if problem.key == "rope_theta":
            problems.append(problem.with_parts(key=local_key))
        else:
            fault = problem.fault.replace("rope_theta or rope_scaling have", f"{local_key} has")
            problems.append(_in_half(WINDOWED, problem.with_parts(fault=fault)))
    return fields | ({"rope.local_base": local["rope.base"]} if "rope.base" in local else {}), problems


def _in_half(kind: str, problem: Problem) -> Problem:
    """Returns a copy of a problem whose key has `kind`, such as `full_attention`, after `rope_parameters.`."""
    return problem.with_parts(key=problem.key.replace("rope_parameters.", f"rope_parameters.{kind}."))


def _of_latent(given: Mapping[str, Json], family: Family) -> tuple[Values, list[Problem]]:
    """Returns the RoPE options of DeepSeek, and an error line for each problem with them.

    For YaRN, DeepSeek has the keys `mscale` and `mscale_all_dim` instead of `attention_factor`. Both must be 1.
    """
    plain, problems = dict(given), list[Problem]()
    for key in ("rope_scaling", "rope_parameters"):
        inner = given.get(key)
        if isinstance(inner, dict) and "yarn" in (inner.get("rope_type"), inner.get("type")):
            got = {name: inner.get(name) for name in (*MSCALES, "attention_factor")}
            if got != {**MSCALES, "attention_factor": None}:
                problems.append(refusal(f"{key}.mscale", got, f"{MSCALES} and no attention_factor"))
            plain[key] = {name: value for name, value in inner.items() if name not in got}
    fields, found = _rope(plain, family)
    return fields, problems + found


def _rope_interval(given: Mapping[str, Json]) -> tuple[Values, list[Problem]]:
    """Returns the option `rope.unrotated_every` of SmolLM 3, and an error line if its keys are invalid.

    The option comes from the list `no_rope_layers` (1: layer with RoPE, 0: layer without), or, if the list is absent,
    from `no_rope_layer_interval`.
    """
    layers, every = (given.get(key) for key in UNROTATED)
    if layers is None:
        fields, problems = dict[str, Value](), list[Problem]()
        take(fields, problems, "rope.unrotated_every", UNROTATED[1], _UNROTATED_EVERY if every is None else every)
        return fields, problems
    every = layers.index(0) + 1 if isinstance(layers, list) and 0 in layers else 0
    num_layers = given.get("num_hidden_layers")
    # Compare lengths first: a corrupt layer count must not create a huge list.
    if isinstance(num_layers, int) and (
        not _has_length(layers, num_layers) or layers != rope_layers(num_layers, every)
    ):
        return {}, [
            refusal(UNROTATED[0], layers, f"{num_layers} layers, with 0 for every n-th layer and 1 for the others")
        ]
    return {"rope.unrotated_every": every}, []


def _has_length(layers: Json, num_layers: int) -> bool:
    return isinstance(layers, list) and len(layers) == num_layers


def rope_layers(num_layers: int, every: int) -> list[Json]:
    """Returns a list with 1 for each layer that uses RoPE, and 0 for each layer that does not.

    Every nth layer does not use RoPE, with n = `every`. If `every` is 0, all layers use RoPE.
    """
    return [int(not every or layer % every != 0) for layer in range(1, num_layers + 1)]


def _rope(given: Mapping[str, Json], family: Family) -> tuple[Values, list[Problem]]:
    """Returns the RoPE options (dotted name -> value) in one set of RoPE keys, and an error line for each problem.

    Newer files have `rope_parameters`, older files `rope_theta` and `rope_scaling`; some have both, with equal values.
    """
    if not family.is_rotary:
        return {}, []
    problems, sides = list[Problem](), list[JsonObject]()
    for key in ("rope_scaling", "rope_parameters"):
        inner = given[key] if key in given and given[key] is not None else {}
        if not isinstance(inner, dict):
            problems.append(refusal(key, inner, "a JSON object"))
            inner = {}
        renamed = {"rope_type" if name == "type" else name: value for name, value in inner.items()}
        sides.append({name: value for name, value in renamed.items() if value is not None})
    older, newer = sides
    if given.get("rope_theta") is not None:
        older["rope_theta"] = given["rope_theta"]
    for name in older.keys() & newer.keys():
        if older[name] != newer[name]:
            problems.append(
                Problem(
                    f"rope_parameters.{name}",
                    got=f"{text_of(newer[name])}, but rope_theta or rope_scaling have {text_of(older[name])}",
                    allowed="the same",
                    nearest=PUBLISHED,
                )
            )
    stated = {"rope_type": "default", **{key: family.absent[key] for key in _ROPE_KEYS if key in family.absent}}
    stated |= older | newer
    where = "rope_parameters" if newer else "rope_scaling"
    kind = stated["rope_type"]
    kinds = _KINDS if family.scales_rope else _KINDS[:1]
    if kind not in kinds:
        return {}, [*problems, refusal(f"{where}.rope_type", kind, ", ".join(kinds))]
    wanted = {**_ROPE_KEYS, **(SCALINGS[kind] if kind in SCALINGS else {})}
    fields: Values = {"rope.scaling": kind} if kind in SCALINGS else {}
    if kind == "yarn":
        stated = {**_YARN_ABSENT, "original_max_position_embeddings": given.get(family.length), **stated}
    for name, option in wanted.items():
        if option:
            key = name if name == "rope_theta" and not newer else f"{where}.{name}"
            take(fields, problems, option, key, stated.get(name))
    for name in stated.keys() - wanted.keys():
        if (name, stated[name]) != ("partial_rotary_factor", 1.0):
            problems.append(refusal(f"{where}.{name}", stated[name], f"{', '.join(wanted)} with {kind}"))
    if kind == "yarn" and fields.get("rope.factor") == 1.0 and fields.get("rope.attention") not in (0.0, 1.0):
        problems.append(
            refusal(f"{where}.attention_factor", stated["attention_factor"], "no attention_factor if factor is 1")
        )
    return fields, problems


def windows(given: Mapping[str, Json], kind: str) -> tuple[Values, list[Problem]]:
    """Returns the sliding-window options of a config.json, and an error line for each problem with them.

    Args:
      given: the content of config.json.
      kind: a key of `FAMILIES`.
    """
    if kind in TURNS:
        return _in_turns(given, kind)
    own = WINDOW_KEYS[kind] if kind in WINDOW_KEYS else ()
    fields, problems = _common_window(given, kind) if own else ({}, [])
    types = None if "layer_types" in own else given.get("layer_types")
    # If all layers of a family are equal, transformers reads only `sliding_window`.
    kinds = {*map(str, types)} if isinstance(types, list) else {str(types)}
    if types is not None and kinds not in ({FULL}, {WINDOWED if fields else FULL}):
        problems.append(refusal("layer_types", types, f"{FULL} in all layers"))
    return fields, problems


def turns(num_layers: int, every: int) -> list[str]:
    """Returns the attention kind of each layer, as in `layer_types`: FULL for every nth layer, otherwise WINDOWED.

    n is `every`. If `every` is 0, all layers have a window.
    """
    return [FULL if every and layer % every == 0 else WINDOWED for layer in range(1, num_layers + 1)]


def _in_turns(given: Mapping[str, Json], kind: str) -> tuple[Values, list[Problem]]:
    """Returns the options `window` and `global_every` of models that alternate windowed and full layers.

    The period `global_every` comes from `layer_types`, or, if it is absent, from `sliding_window_pattern`. If both keys
    are absent, the period is the family's default in `TURNS`. An error line is returned for each problem.
    """
    num_layers, window, types = (given.get(key) for key in ("num_hidden_layers", "sliding_window", "layer_types"))
    patterns = {key: given[key] for key in WINDOW_KEYS[kind] if key.endswith("_pattern") and given.get(key) is not None}
    key, every = next(iter(patterns.items()), ("", TURNS[kind]))
    if types is not None:
        every = types.index(FULL) + 1 if isinstance(types, list) and FULL in types else 0
    elif any(value != every for value in patterns.values()) or type(every) is not int or every < 1:
        return {}, [refusal(key, every, f"the same integer, at least 1, in {', '.join(patterns)}")]
    if not isinstance(num_layers, int):
        return {}, []  # `_fields` in config_json reports num_hidden_layers
    if types is not None and (not _has_length(types, num_layers) or types != turns(num_layers, every)):
        return {}, [refusal("layer_types", types, f"{num_layers} layers, of which every n-th is {FULL}")]
    if every == 1:
        return {}, []
    size = given.get("sliding_window_size") if "sliding_window_size" in WINDOW_KEYS[kind] else None
    if size is not None and size != window:
        return {}, [refusal("sliding_window_size", size, f"{window}, the value of sliding_window")]
    fields, problems = {"global_every": every}, list[Problem]()
    take(fields, problems, "window", "sliding_window", window)
    return ({}, problems) if problems else (fields, [])


def _common_window(given: Mapping[str, Json], kind: str) -> tuple[Values, list[Problem]]:
    """Returns the option `window` of a model with equal layers, and an error line if only some layers have a window."""
    window, types, absent = given.get("sliding_window"), None, FAMILIES[kind].absent
    if "sliding_window" not in given and "sliding_window" in absent:
        window = absent["sliding_window"]
    fields, problems, layers = dict[str, Value](), list[Problem](), {WINDOWED}
    if "use_sliding_window" in WINDOW_KEYS[kind]:
        is_used, types = given.get("use_sliding_window"), given.get("layer_types")
        if is_used not in (None, False, True):
            problems.append(refusal("use_sliding_window", is_used, "true, false"))
        window = window if is_used else None
        layers = _layer_kinds(given, window)
    if layers == {FULL} or (window is None and layers == {WINDOWED} and types is None):
        return {}, problems
    if layers != {WINDOWED} or window is None:
        key = "layer_types" if types is not None else "max_window_layers"
        return {}, [*problems, refusal(key, given.get(key), "a window in all layers or in none")]
    take(fields, problems, "window", "sliding_window", window)
    return fields, problems


def _layer_kinds(given: Mapping[str, Json], window: Json) -> set[str]:
    """Returns the set of attention kinds, WINDOWED or FULL, that occur in the layers of the model.

    If `layer_types` is absent, the layers from `max_window_layers` on have a window, and the layers before are full.
    `window` is the size of the window in tokens; None: no layer has a window.
    """
    types, first, num_layers = (given.get(key) for key in ("layer_types", "max_window_layers", "num_hidden_layers"))
    if types is not None:
        is_list = isinstance(types, list) and all(isinstance(one, str) for one in types)
        return set(types) if is_list else {"", str(types)}  # two kinds, so that the caller rejects the list
    if window is None or not isinstance(first, int) or not isinstance(num_layers, int) or first >= num_layers:
        return {FULL}
    return {WINDOWED} if first <= 0 else {WINDOWED, FULL}
