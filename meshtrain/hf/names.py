"""Tables of tensor names: which tensors of a Hugging Face model contain the decoder's weights, and in which layout.

A layout lists dims by letter: D embed dim, N query heads, G key and value heads, H head dim, F mlp dim, E experts, X
expert dim, V vocabulary without padding, P learned positions. `(N H)` is one dim of a file that merges N and H, with N
outermost. `3` is a dim of a file that stacks queries, keys and values; `2` stacks the gate and up projections. `J`
concatenates the heads of queries, keys and values. I is the mlp dim of the dense layers, which precede the layers with
experts, and S is the dim of the shared experts.

For latent attention, Q is the query latent, and R the latent of keys and values. A is R plus the rotary channels, B is
a head's key channels plus its values, and W is the value dim of a head. The decoder and Hugging Face pair rotary
channels in the same way (the two halves of a head; neighbors in latent attention), so no head is permuted.

The names are the state dict keys of the package transformers (Wolf et al. 2020).
"""

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.hf import mxfp4
from meshtrain.models.transformer.decoder import DecoderOptions

_GPT2_PREFIX = "transformer."  # missing in old files
_SIDE_BY_SIDE = {"3": 3, "2": 2}
_JOINT, _HEADS_OF = "J", ("N", "G", "G")  # the heads of queries, keys and values, the parts of J
_FIRST = "first_layers"


class Weight(NamedTuple):
    """A weight of the decoder, and its tensor in a Hugging Face model.

    Letters name dims, such as D (embed dim), N (query heads), G (key and value heads), H (head dim), E (experts); the
    module's docstring lists all. Parentheses merge dims, the first is outermost. Three dims join several weights in one
    tensor: `3` stacks queries, keys and values; `2` stacks the gate and up projections; `J` concatenates the heads of
    queries, keys and values, N + 2 G heads.

    Attributes:
      path: the path of the decoder's parameter, without `params/`.
      name: the name of the tensor; the first `{}` is replaced by the layer's index, the second by the expert's index.
      layout: the letters of the parameter's dims, such as `D N H`, without the leading dims that stack the tensors of
        layers and experts.
      stored: the letters of the tensor's dims in the file, such as `(N H) D`.
      part: the weight's index among the weights in the tensor. In `3` and `J`: 0 for queries, 1 for keys, 2 for values.
        In `2`: 0 for gate, 1 for up.
      is_packed: whether the last dim of `stored` is in blocks of MXFP4 (4-bit numbers). The experts' dim E is then the
        first dim of `layout` and of `stored`.
    """

    path: str
    name: str
    layout: str
    stored: str
    part: int = 0
    is_packed: bool = False

    @property
    def stacks(self) -> str:
        """The letters of the parameter's leading dims, which stack tensors: L for layers, E for experts.

        K instead of L stacks the dense layers before the repeated layers. `layout` does not include these dims.
        """
        return ("KE" if self.path.startswith(_FIRST) else "LE")[: self.name.count("{}")]

    @property
    def letters(self) -> list[str]:
        """The letters of the dims of `stored`; J is replaced by the heads of this weight, N or G."""
        return [_HEADS_OF[self.part] if letter == _JOINT else letter for letter in re.findall(r"\w", self.stored)]


_LLAMA = (
    Weight("embedding/table", "model.embed_tokens.weight", "V D", "V D"),
    Weight("layers/attention_norm/scale", "model.layers.{}.input_layernorm.weight", "D", "D"),
    Weight("layers/attention/query", "model.layers.{}.self_attn.q_proj.weight", "D N H", "(N H) D"),
    Weight("layers/attention/key", "model.layers.{}.self_attn.k_proj.weight", "D G H", "(G H) D"),
    Weight("layers/attention/value", "model.layers.{}.self_attn.v_proj.weight", "D G H", "(G H) D"),
    Weight("layers/attention/output", "model.layers.{}.self_attn.o_proj.weight", "N H D", "D (N H)"),
    Weight("layers/mlp_norm/scale", "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    Weight("layers/mlp/gate", "model.layers.{}.mlp.gate_proj.weight", "D F", "F D"),
    Weight("layers/mlp/up", "model.layers.{}.mlp.up_proj.weight", "D F", "F D"),
    Weight("layers/mlp/down", "model.layers.{}.mlp.down_proj.weight", "F D", "D F"),
    Weight("head/norm/scale", "model.norm.weight", "D", "D"),
)
_QKV_BIASES = (
    Weight("layers/attention/query_bias", "model.layers.{}.self_attn.q_proj.bias", "N H", "(N H)"),
    Weight("layers/attention/key_bias", "model.layers.{}.self_attn.k_proj.bias", "G H", "(G H)"),
    Weight("layers/attention/value_bias", "model.layers.{}.self_attn.v_proj.bias", "G H", "(G H)"),
)
_OUTPUT_BIAS = Weight("layers/attention/output_bias", "model.layers.{}.self_attn.o_proj.bias", "D", "D")
_MLP_BIASES = (
    Weight("layers/mlp/gate_bias", "model.layers.{}.mlp.gate_proj.bias", "F", "F"),
    Weight("layers/mlp/up_bias", "model.layers.{}.mlp.up_proj.bias", "F", "F"),
    Weight("layers/mlp/down_bias", "model.layers.{}.mlp.down_proj.bias", "D", "D"),
)
_QK_NORM = (
    Weight("layers/attention/query_norm/scale", "model.layers.{}.self_attn.q_norm.weight", "H", "H"),
    Weight("layers/attention/key_norm/scale", "model.layers.{}.self_attn.k_norm.weight", "H", "H"),
)
_QK_NORM_OF_ALL = (
    Weight("layers/attention/query_norm/scale", "model.layers.{}.self_attn.q_norm.weight", "N H", "(N H)"),
    Weight("layers/attention/key_norm/scale", "model.layers.{}.self_attn.k_norm.weight", "G H", "(G H)"),
)
_WITHOUT_MLP = tuple(row for row in _LLAMA if not row.path.startswith("layers/mlp/"))
_MIXTRAL = (
    *_WITHOUT_MLP,
    Weight("layers/experts/router", "model.layers.{}.block_sparse_moe.gate.weight", "D E", "E D"),
    Weight("layers/experts/gate", "model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "D X", "X D"),
    Weight("layers/experts/down", "model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "X D", "D X"),
    Weight("layers/experts/up", "model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "D X", "X D"),
)
_QWEN3_MOE = (
    *_WITHOUT_MLP,
    Weight("layers/experts/router", "model.layers.{}.mlp.gate.weight", "D E", "E D"),
    Weight("layers/experts/gate", "model.layers.{}.mlp.experts.{}.gate_proj.weight", "D X", "X D"),
    Weight("layers/experts/up", "model.layers.{}.mlp.experts.{}.up_proj.weight", "D X", "X D"),
    Weight("layers/experts/down", "model.layers.{}.mlp.experts.{}.down_proj.weight", "X D", "D X"),
)
# One tensor for all experts of a layer: the layout of newer transformers versions in memory, and of some files.
_FUSED = (
    Weight("layers/experts/router", "model.layers.{}.mlp.gate.weight", "D E", "E D"),
    Weight("layers/experts/gate", "model.layers.{}.mlp.experts.gate_up_proj", "E D X", "E (2 X) D", 0),
    Weight("layers/experts/up", "model.layers.{}.mlp.experts.gate_up_proj", "E D X", "E (2 X) D", 1),
    Weight("layers/experts/down", "model.layers.{}.mlp.experts.down_proj", "E X D", "E D X"),
)
_GPT_OSS = (
    *_WITHOUT_MLP,
    Weight("layers/attention/sinks", "model.layers.{}.self_attn.sinks", "N", "N"),
    Weight("layers/experts/router", "model.layers.{}.mlp.router.weight", "D E", "E D"),
    Weight("layers/experts/router_shift", "model.layers.{}.mlp.router.bias", "E", "E"),
    Weight("layers/experts/gate", "model.layers.{}.mlp.experts.gate_up_proj", "E D X", "E D (X 2)", 0),
    Weight("layers/experts/up", "model.layers.{}.mlp.experts.gate_up_proj", "E D X", "E D (X 2)", 1),
    Weight("layers/experts/gate_bias", "model.layers.{}.mlp.experts.gate_up_proj_bias", "E X", "E (X 2)", 0),
    Weight("layers/experts/up_bias", "model.layers.{}.mlp.experts.gate_up_proj_bias", "E X", "E (X 2)", 1),
    Weight("layers/experts/down", "model.layers.{}.mlp.experts.down_proj", "E X D", "E X D"),
    Weight("layers/experts/down_bias", "model.layers.{}.mlp.experts.down_proj_bias", "E D", "E D"),
)
# The matrices of gpt-oss's experts in 4 bits, transposed.
_PACKED = (
    Weight("layers/experts/gate", "model.layers.{}.mlp.experts.gate_up_proj", "E D X", "E (X 2) D", 0, True),
    Weight("layers/experts/up", "model.layers.{}.mlp.experts.gate_up_proj", "E D X", "E (X 2) D", 1, True),
    Weight("layers/experts/down", "model.layers.{}.mlp.experts.down_proj", "E X D", "E D X", 0, True),
)
# In layers with four norms, "post_attention_layernorm" is not the norm before the mlp.
_GEMMA2 = (
    *(row for row in _LLAMA if row.path != "layers/mlp_norm/scale"),
    Weight("layers/attention_post_norm/scale", "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    Weight("layers/mlp_norm/scale", "model.layers.{}.pre_feedforward_layernorm.weight", "D", "D"),
    Weight("layers/mlp_post_norm/scale", "model.layers.{}.post_feedforward_layernorm.weight", "D", "D"),
)
# OLMo 2 and 3 have norms only after attention and mlp.
_OLMO2 = tuple(row for row in _GEMMA2 if row.path not in ("layers/attention_norm/scale", "layers/mlp_norm/scale"))
_PHI3 = (
    *(row for row in _LLAMA if row.path.rpartition("/")[2] not in ("query", "key", "value", "gate", "up")),
    Weight("layers/attention/query", "model.layers.{}.self_attn.qkv_proj.weight", "D N H", "(J H) D", 0),
    Weight("layers/attention/key", "model.layers.{}.self_attn.qkv_proj.weight", "D G H", "(J H) D", 1),
    Weight("layers/attention/value", "model.layers.{}.self_attn.qkv_proj.weight", "D G H", "(J H) D", 2),
    Weight("layers/mlp/gate", "model.layers.{}.mlp.gate_up_proj.weight", "D F", "(2 F) D", 0),
    Weight("layers/mlp/up", "model.layers.{}.mlp.gate_up_proj.weight", "D F", "(2 F) D", 1),
)
_GPT2 = (
    Weight("embedding/table", "transformer.wte.weight", "V D", "V D"),
    Weight("embedding/positions", "transformer.wpe.weight", "P D", "P D"),
    Weight("layers/attention_norm/scale", "transformer.h.{}.ln_1.weight", "D", "D"),
    Weight("layers/attention_norm/bias", "transformer.h.{}.ln_1.bias", "D", "D"),
    Weight("layers/attention/query", "transformer.h.{}.attn.c_attn.weight", "D N H", "D (3 N H)", 0),
    Weight("layers/attention/key", "transformer.h.{}.attn.c_attn.weight", "D N H", "D (3 N H)", 1),
    Weight("layers/attention/value", "transformer.h.{}.attn.c_attn.weight", "D N H", "D (3 N H)", 2),
    Weight("layers/attention/query_bias", "transformer.h.{}.attn.c_attn.bias", "N H", "(3 N H)", 0),
    Weight("layers/attention/key_bias", "transformer.h.{}.attn.c_attn.bias", "N H", "(3 N H)", 1),
    Weight("layers/attention/value_bias", "transformer.h.{}.attn.c_attn.bias", "N H", "(3 N H)", 2),
    Weight("layers/attention/output", "transformer.h.{}.attn.c_proj.weight", "N H D", "(N H) D"),
    Weight("layers/attention/output_bias", "transformer.h.{}.attn.c_proj.bias", "D", "D"),
    Weight("layers/mlp_norm/scale", "transformer.h.{}.ln_2.weight", "D", "D"),
    Weight("layers/mlp_norm/bias", "transformer.h.{}.ln_2.bias", "D", "D"),
    Weight("layers/mlp/up", "transformer.h.{}.mlp.c_fc.weight", "D F", "D F"),
    Weight("layers/mlp/up_bias", "transformer.h.{}.mlp.c_fc.bias", "F", "F"),
    Weight("layers/mlp/down", "transformer.h.{}.mlp.c_proj.weight", "F D", "F D"),
    Weight("layers/mlp/down_bias", "transformer.h.{}.mlp.c_proj.bias", "D", "D"),
    Weight("head/norm/scale", "transformer.ln_f.weight", "D", "D"),
    Weight("head/norm/bias", "transformer.ln_f.bias", "D", "D"),
)
_STARCODER2 = (
    *_WITHOUT_MLP,
    *_QKV_BIASES,
    _OUTPUT_BIAS,
    Weight("layers/attention_norm/bias", "model.layers.{}.input_layernorm.bias", "D", "D"),
    Weight("layers/mlp_norm/bias", "model.layers.{}.post_attention_layernorm.bias", "D", "D"),
    Weight("layers/mlp/up", "model.layers.{}.mlp.c_fc.weight", "D F", "F D"),
    Weight("layers/mlp/up_bias", "model.layers.{}.mlp.c_fc.bias", "F", "F"),
    Weight("layers/mlp/down", "model.layers.{}.mlp.c_proj.weight", "F D", "D F"),
    Weight("layers/mlp/down_bias", "model.layers.{}.mlp.c_proj.bias", "D", "D"),
    Weight("head/norm/bias", "model.norm.bias", "D", "D"),
)
_OF_LATENT = (
    ("attention_norm/scale", "input_layernorm.weight", "D", "D"),
    ("attention/query_down", "self_attn.q_a_proj.weight", "D Q", "Q D"),
    ("attention/query_latent_norm/scale", "self_attn.q_a_layernorm.weight", "Q", "Q"),
    ("attention/query", "self_attn.q_b_proj.weight", "Q N H", "(N H) Q"),
    ("attention/key_value_down", "self_attn.kv_a_proj_with_mqa.weight", "D A", "A D"),
    ("attention/latent_norm/scale", "self_attn.kv_a_layernorm.weight", "R", "R"),
    ("attention/key_value", "self_attn.kv_b_proj.weight", "R N B", "(N B) R"),
    ("attention/output", "self_attn.o_proj.weight", "N W D", "D (N W)"),
    ("mlp_norm/scale", "post_attention_layernorm.weight", "D", "D"),
)
_WHOLE_QUERY = ("attention/query", "self_attn.q_proj.weight", "D N H", "(N H) D")  # if there is no query latent
_DENSE = (
    ("mlp/gate", "mlp.gate_proj.weight", "D I", "I D"),
    ("mlp/up", "mlp.up_proj.weight", "D I", "I D"),
    ("mlp/down", "mlp.down_proj.weight", "I D", "D I"),
)
_OF_EXPERTS = (
    ("experts/router", "mlp.gate.weight", "D E", "E D"),
    ("experts/router_bias", "mlp.gate.e_score_correction_bias", "E", "E"),
    ("experts/gate", "mlp.experts.{}.gate_proj.weight", "D X", "X D"),
    ("experts/up", "mlp.experts.{}.up_proj.weight", "D X", "X D"),
    ("experts/down", "mlp.experts.{}.down_proj.weight", "X D", "D X"),
    ("experts/shared/gate", "mlp.shared_experts.gate_proj.weight", "D S", "S D"),
    ("experts/shared/up", "mlp.shared_experts.up_proj.weight", "D S", "S D"),
    ("experts/shared/down", "mlp.shared_experts.down_proj.weight", "S D", "D S"),
)
_HEAD = Weight("head/kernel", "lm_head.weight", "D V", "V D")

_TABLES = {
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi3": _PHI3,
    "gpt_oss": _GPT_OSS,
    "gpt2": _GPT2,
    "starcoder2": _STARCODER2,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
}
# Constants that old files store in addition to the weights: causal masks, rotary frequencies. The model computes them.
_CONSTANTS = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)


# In multimodal files: the prefix of the text model's names, and the pattern of all other names.
_OF_TEXT = {"language_model.": "", "model.language_model.": "model."}  # prefix -> the prefix it replaces
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")


def _deepseek(options: DecoderOptions) -> list[Weight]:
    """Returns the table rows of DeepSeek, with a dense mlp in the first `moe.dense_layers` layers, then experts."""
    attention = [row for row in _OF_LATENT if options.latent.query_dim or not row[0].startswith("attention/query")]
    attention += [] if options.latent.query_dim else [_WHOLE_QUERY]
    experts = [row for row in _OF_EXPERTS if options.moe.shared_experts or "/shared/" not in row[0]]
    stacks = {_FIRST: (*attention, *_DENSE), "layers": (*attention, *experts)}
    rows = [
        Weight(f"{stack}/{path}", f"model.layers.{{}}.{name}", layout, stored)
        for stack, of_layer in stacks.items()
        for path, name, layout, stored in of_layer
        if stack == "layers" or options.num_dense
    ]
    return [_LLAMA[0], *rows, _LLAMA[-1]]


def weights(family: str, options: DecoderOptions) -> list[Weight]:
    """Returns the table of tensor names: a row for each weight of a decoder with these options.

    Args:
      family: a key of `families.FAMILIES`.
      options: the options of the decoder.
    """
    if options.latent.dim:
        return [*_deepseek(options), *(() if options.tied_embeddings else (_HEAD,))]
    table = [*(_TABLES[family] if family in _TABLES else _LLAMA), *(() if options.tied_embeddings else (_HEAD,))]
    table += _QKV_BIASES if options.qkv_biases or options.attention_biases else ()
    table += (_OUTPUT_BIAS,) if options.attention_biases else ()
    table += _MLP_BIASES if options.mlp_biases else ()
    norms = _QK_NORM_OF_ALL if options.norm.qk_of_all else _QK_NORM
    return table + [*(norms if options.norm.qk else ())]


def table_and_head(family: str, options: DecoderOptions, names: Collection[str]) -> tuple[str, str]:
    """Returns the tensor names of the embedding table and of a separate output head, with the files' prefix.

    The files need not have an output head.

    Args:
      family: a key of `families.FAMILIES`.
      options: the options of the decoder.
      names: the names of all tensors in the files.
    """
    untied = as_in_files(weights(family, dataclasses.replace(options, tied_embeddings=False)), names)
    name_of = {row.path: row.name for row in untied}
    return name_of["embedding/table"], name_of[_HEAD.path]


def as_in_files(table: Sequence[Weight], names: Collection[str]) -> list[Weight]:
    """Returns the table with its tensor names and layouts adapted to the files.

    Files vary: old GPT-2 files have no prefix, and multimodal files have another prefix. Some MoE files have one tensor
    for all experts of a layer, some of them in 4 bits.

    Args:
      table: the table of tensor names, from `weights`.
      names: the names of the tensors in the files.
    """
    fused = {row.path: row for row in _FUSED if row.name.format(0) in names}
    has_own = any(row.stacks == "LE" for row in table)
    if len(fused) > 1 and has_own:  # files with a tensor for each expert may also have the router's name
        table = [fused[row.path] if row.path in fused else row for row in table]
    packed = {row.path: row for row in _PACKED if f"{row.name.format(0)}{mxfp4.BLOCKS}" in names}
    table = [packed[row.path] if row.path in packed else row for row in table]
    for prefix, replaced in _OF_TEXT.items():
        if any(name.startswith(prefix) for name in names):
            return [row._replace(name=re.sub(f"^{replaced}", prefix, row.name)) for row in table]
    if any(name.startswith(_GPT2_PREFIX) for name in names):
        return list(table)
    return [weight._replace(name=weight.name.removeprefix(_GPT2_PREFIX)) for weight in table]


def is_of_images(name: str) -> bool:
    """Returns whether a tensor belongs to the image part of a multimodal model, which is not imported."""
    return _OF_IMAGES.fullmatch(name) is not None


def is_ignored(name: str, options: DecoderOptions) -> bool:
    """Returns whether import ignores the tensor `name` of a file; other tensors that no table row names are errors.

    Ignored tensors are constants, weights of an image model, the output head of a model with tied embeddings, and
    layers for multi-token prediction.
    """
    is_copy = options.tied_embeddings and name.endswith(_HEAD.name)
    layer = re.match(r"model\.layers\.(\d+)\.", name) if options.latent.dim else None
    if layer and int(layer[1]) >= options.num_layers:
        return True  # layers for multi-token prediction
    return is_copy or is_of_images(name) or _CONSTANTS.fullmatch(name) is not None


def sizes(options: DecoderOptions) -> dict[str, int]:
    """Returns letter -> size for each dim in `Weight.layout`, `stored` and `stacks`; V excludes vocabulary padding."""
    return {
        "K": options.num_dense,
        "L": options.num_repeated,
        "D": options.embed_dim,
        "N": options.num_heads,
        "G": options.num_kv_heads,
        "H": options.width_of_head,
        "F": options.mlp_dim,
        "V": options.vocab_size,
        "P": options.max_positions,
        "E": options.moe.num_experts,
        "X": options.moe.expert_dim,
        "Q": options.latent.query_dim,
        "R": options.latent.dim,
        "A": options.latent.dim + options.latent.rope_dim,
        "B": options.width_of_head - options.latent.rope_dim + options.width_of_values,
        "W": options.width_of_values,
        "I": options.moe.dense_dim,
        "S": options.moe.shared_experts * options.moe.expert_dim,
        _JOINT: options.num_heads + 2 * options.num_kv_heads,
        **_SIDE_BY_SIDE,
    }


def stack(weight: Weight, size: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the sizes of the parameter's leading dims, which stack tensors: (layers, experts), (layers,) or ().

    Args:
      weight: the weight, a row of the table `weights`.
      size: letter -> size, from `sizes`.
    """
    return tuple(size[letter] for letter in weight.stacks)


def tensor_names(weight: Weight, size: Mapping[str, int]) -> list[str]:
    """Returns the names of the tensors that contain a weight: one for each layer and expert, in row-major order.

    >>> tensor_names(Weight("x", "a.{}.b.{}", "D", "D"), {"K": 1, "L": 2, "E": 2})
    ['a.1.b.0', 'a.1.b.1', 'a.2.b.0', 'a.2.b.1']
    """
    return [tensor_name(weight, place, size) for place in np.ndindex(*stack(weight, size))]


def tensor_name(weight: Weight, place: tuple[int, ...], size: Mapping[str, int]) -> str:
    """Returns the name of the tensor that contains one layer (and expert) of a weight.

    Args:
      weight: the weight, a row of the table `weights`.
      place: the index in the dims that `stack` returns: (layer, expert), (layer,) or (). The first repeated layer has
        index 0 here, but the name numbers repeated layers after the dense layers.
      size: letter -> size, from `sizes`.
    """
    first = size["K"] if weight.stacks.startswith("L") else 0
    return weight.name.format(*(index + first * (dim == 0) for dim, index in enumerate(place)))


def by_tensor(table: Sequence[Weight]) -> list[list[Weight]]:
    """Returns the rows of a table in groups: the weights of one group are stored in the same tensors."""
    rows = collections.defaultdict(list)
    for weight in table:
        rows[weight.name, weight.stacks].append(weight)
    return list(rows.values())


def shape_in_file(weight: Weight, size: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape in a file of a tensor that contains `weight`; `size` is the result of `sizes`.

    >>> shape_in_file(Weight("x", "y", "D N H", "(N H) D"), {"D": 6, "N": 2, "H": 4})
    (8, 6)
    """
    shape = []
    for group in re.findall(r"\([^)]*\)|\S", weight.stored):
        product = 1
        for letter in re.findall(r"\w", group):
            product *= size[letter]
        shape.append(product)
    return tuple(shape)


def tensor_shapes(weight: Weight, size: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the tensors that contain a weight; a tensor may also contain other weights."""
    shape, result = shape_in_file(weight, size), dict[str, tuple[int, ...]]()
    for name in tensor_names(weight, size):
        result |= mxfp4.shapes(name, shape) if weight.is_packed else {name: shape}
    return result


def unpack_experts(
    tensors: Mapping[str, np.ndarray], name: str, weight: Weight, size: Mapping[str, int]
) -> list[mxfp4.Packed]:
    """Returns the matrix of each expert of a layer, from two MXFP4 tensors; the matrices are views and read no data.

    Args:
      tensors: name -> tensor.
      name: the name of the encoded tensor, without `_blocks` or `_scales`.
      weight: the weight, a row of the table `weights`.
      size: letter -> size, from `sizes`.
    """
    blocks, scales = tensors[f"{name}{mxfp4.BLOCKS}"], tensors[f"{name}{mxfp4.SCALES}"]
    of_blocks = {**size, weight.letters[-1]: scales.shape[-1]}
    whole = blocks.view([("bytes", np.uint8, mxfp4.BYTES)])[..., 0]  # makes each block one element
    numbers, exponents = as_ours(whole, weight, of_blocks)["bytes"], as_ours(scales, weight, of_blocks)
    return [mxfp4.Packed(*expert) for expert in zip(numbers, exponents, strict=True)]


def as_ours(tensor: np.ndarray, weight: Weight, size: Mapping[str, int]) -> np.ndarray:
    """Returns a weight in the decoder's layout as a view of a file's tensor; reads no data.

    Args:
      tensor: a contiguous numpy array of shape `shape_in_file`, which may contain other weights, too.
      weight: the weight, a row of the table `weights`.
      size: letter -> size, from `sizes`.
    """
    of_file, letters = re.findall(r"\w", weight.stored), weight.letters
    apart = tensor.reshape([size[letter] for letter in of_file])
    if _JOINT in of_file:
        begin = sum(size[letter] for letter in _HEADS_OF[: weight.part])
        own = slice(begin, begin + size[_HEADS_OF[weight.part]])
        apart = apart[(slice(None),) * of_file.index(_JOINT) + (own,)]
    for beside in _SIDE_BY_SIDE.keys() & letters:
        # Indexing instead of `take`, which would copy.
        apart = apart[(slice(None),) * letters.index(beside) + (weight.part,)]
        letters.remove(beside)
    return apart.transpose([letters.index(letter) for letter in weight.layout.split()])


def as_stored(leaves: Sequence[np.ndarray], rows: Sequence[Weight], size: Mapping[str, int]) -> np.ndarray:
    """Builds the tensor of a file from the weights that it contains; the inverse of `as_ours`.

    Args:
      leaves: the weights in the decoder's layout, without the dims of `stack`; the vocabulary may be padded.
      rows: the weights, rows of the table `weights` with the same tensor name, ordered by `part`.
      size: letter -> size, from `sizes`.
    """
    letters, parts = re.findall(r"\w", rows[0].stored), []
    for leaf, row in zip(leaves, rows, strict=True):
        own = row.layout.split()
        cut = leaf[tuple(slice(0, size[letter]) for letter in own)]
        parts.append(cut.transpose([own.index(letter) for letter in row.letters if letter not in _SIDE_BY_SIDE]))
    if _JOINT in letters:
        return np.concatenate(parts, axis=letters.index(_JOINT)).reshape(shape_in_file(rows[0], size))
    beside = next((place for place, letter in enumerate(letters) if letter in _SIDE_BY_SIDE), None)
    stacked = parts[0] if beside is None else np.stack(parts, axis=beside)
    return stacked.reshape(shape_in_file(rows[0], size))
