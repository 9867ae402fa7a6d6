"""The options of the decoder; docs/design/model.md explains the computations that they select."""

import dataclasses
import math

from meshtrain.models.attention.attention import Attention, Latent
from meshtrain.models.rotary import Scaling
from meshtrain.options import Conditions, Except, option

ROTARY = {"positions": ("rotary",)}
_SCALED: Conditions = {"factor": Except(1.0)}
_RAMPED: Conditions = {"scaling": ("llama3", "yarn"), **_SCALED}
_YARN: Conditions = {"scaling": ("yarn",), **_SCALED}
_WITHOUT_BIASES: Conditions = {"biases": (False,)}
_WINDOWED = {"window": Except(0)}
ROUTERS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class RopeOptions:
    """The options of rotary positions."""

    base: float = option(10000.0, "rotary base (theta)", minimum=1.0)
    factor: float = option(1.0, "rope scaling: divisor of low frequencies; 1: no scaling", minimum=1.0)
    scaling: str = option(
        "llama3", "which frequencies rope scaling divides: as Llama 3, as YaRN, or all (linear)",
        choices=("llama3", "yarn", "linear"), only_for=_SCALED,
    )  # fmt: skip
    low: float = option(
        1.0,
        "rope scaling: frequencies with fewer turns in the original length are divided (low_freq_factor; beta_slow)",
        only_for=_RAMPED,
    )
    high: float = option(
        4.0,
        "rope scaling: frequencies with more turns stay (high_freq_factor; beta_fast, 32 as published)",
        only_for=_RAMPED,
    )
    original_length: int = option(
        8192, "rope scaling: original sequence length, in tokens", minimum=1, only_for=_RAMPED
    )
    attention: float = option(
        0.0, "YaRN: factor of rotated queries and keys; 0: 0.1 ln(factor) + 1", minimum=0.0,
        only_for=_YARN,
    )  # fmt: skip
    whole_pairs: bool = option(
        True, "YaRN: the range of frequencies between both limits is rounded outwards to complete pairs", only_for=_YARN
    )
    local_base: float = option(
        0.0, "rotary base of layers with a window, without scaling, as in Gemma 3; 0: as other layers",
        minimum=0.0, only_for=_WINDOWED,
    )  # fmt: skip
    unrotated_every: int = option(
        0,
        "every n-th layer has no rotary positions (4 in SmolLM 3); 0: all layers have rotary positions",
        minimum=0,
    )

    @property
    def frequency_scaling(self) -> Scaling | None:
        """The scaling of rotary frequencies; None: no scaling."""
        if self.factor == 1.0:
            return None
        return Scaling(self.factor, self.low, self.high, self.original_length, self.scaling, self.whole_pairs)

    @property
    def stretch(self) -> float | None:
        """The number by which YaRN multiplies rotated queries and keys (Peng et al. 2023, section 3.4).

        It is `attention`, or 0.1 ln(`factor`) + 1 if `attention` is 0. None: `factor` is 1 or `scaling` is not
        `yarn`. In latent attention, all channels of queries and keys have this factor.
        """
        if self.factor == 1.0 or self.scaling != "yarn":
            return None
        return self.attention or 0.1 * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LatentOptions:
    """The options of multi-head latent attention, as in DeepSeek-V3.

    Keys and values of all heads are projected from one narrow vector per token.
    """

    dim: int = option(
        0,
        "width of the latent from which keys and values of all heads are projected, and which the cache stores, as "
        "in DeepSeek-V3; 0: none",
        minimum=0,
    )
    query_dim: int = option(0, "width of the latent from which queries are projected; 0: none", minimum=0)
    rope_dim: int = option(
        0, "additional rotary channels of a head, whose key is shared by all heads; an even number", minimum=0,
    )  # fmt: skip
    value_dim: int = option(0, "width of a value head; 0: head_dim", minimum=0)


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """The options of the norms in layers, and of the norms of queries and keys."""

    name: str = option("rmsnorm", "normalization", choices=("rmsnorm", "layernorm"))
    epsilon: float = option(1e-5, "number added to the variance, for stability", minimum=0.0)
    centered_scales: bool = option(False, "norms multiply by 1 + scale, as in Gemma; scales start at 0")
    post: bool = option(False, "also normalize the outputs of attention and mlp, as in Gemma 2 and 3")
    pre: bool = option(
        True, "with post, also normalize the inputs of attention and mlp; OLMo 2 and 3 do not",
        only_for={"post": (True,)},
    )  # fmt: skip
    qk: bool = option(False, "RMSNorm of each head's queries and keys before rotary positions, as in Qwen 3")
    qk_of_all: bool = option(
        False, "one norm over all heads of the queries, one over all heads of the keys, as in OLMo 2 and 3",
        only_for={"qk": (True,)},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MoeOptions:
    """The options of a mixture of experts, which replaces the mlp of each layer."""

    num_experts: int = option(
        0,
        "experts that replace each mlp; a token is sent to some of them; 0: none",
        minimum=0,
        maximum=2**20,  # the ends of their rows are int32, and there is one more end than experts
        dim="experts",
    )
    experts_per_token: int = option(2, "experts that a token is sent to", minimum=1)
    expert_dim: int = option(512, "inner width of an expert", minimum=1, dim="expert_mlp")
    shared_experts: int = option(0, "shared experts, computed as one mlp, that every token passes through", minimum=0)
    biases: bool = option(False, "biases of experts and of the router's logits, as in gpt-oss")
    router: str = option(
        "softmax",
        "scores of experts: softmax of logits, as in Mixtral and Qwen3-MoE, or their sigmoid with a bias that "
        "balances the load, as in DeepSeek-V3",
        choices=ROUTERS,
    )
    router_groups: int = option(
        1, "number of groups of experts; a token uses only groups whose two best experts score highest", minimum=1,
    )  # fmt: skip
    groups_per_token: int = option(
        1, "number of groups whose experts a token may use", minimum=1, only_for={"router_groups": Except(1)}
    )
    dense_layers: int = option(
        0, "number of first layers with one mlp instead of experts, as in DeepSeek-V3", minimum=0
    )
    dense_dim: int = option(
        512, "inner width of the mlp in these first layers", minimum=1, only_for={"dense_layers": Except(0)}
    )
    router_scale: float = option(1.0, "factor of the gates, which add up to 1", minimum=0.0)
    balance_weight: float = option(
        0.01,
        "weight of the loss that balances the load of experts in each sequence: a mean over layers and a sum over "
        "the experts of a token, as router_aux_loss_coef in transformers; 0: none",
        minimum=0.0,
    )
    z_weight: float = option(
        0.001,
        "weight of the router z-loss, the squared log-sum-exp of router logits, summed over layers",
        minimum=0.0,
    )


class TransformerShape:
    """The options and derived sizes that the decoder and the encoder-decoder share."""

    embed_dim: int
    num_heads: int
    head_dim: int
    vocab_size: int
    vocab_multiple: int
    dropout_rate: float
    positions: str
    loss_chunk: int
    attention: str
    biases: bool

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def width_of_head(self) -> int:
        """The width of an attention head: `head_dim`, or `embed_dim / num_heads` if `head_dim` is 0."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def width_of_values(self) -> int:
        """The width of a value head."""
        return self.width_of_head

    @property
    def width_of_rotary(self) -> int:
        """The number of channels of a query or key head that rotary positions rotate: all channels."""
        return self.width_of_head

    @property
    def attends(self) -> Attention:
        """The settings of a layer's attention, with a key and a value head for each query head."""
        heads, biases = self.num_heads, self.biases
        return Attention(heads, heads, self.width_of_head, self.attention, qkv_biases=biases, output_bias=biases)


@dataclasses.dataclass(frozen=True)
class DecoderOptions(TransformerShape):
    """The options of the decoder: its sizes and the variants of its layers."""

    num_layers: int = option(4, "transformer layers", minimum=1, maximum=100_000)
    embed_dim: int = option(128, "width of the residual stream", minimum=1, dim="embed")
    mlp_dim: int = option(512, "inner width of the mlp", minimum=1, dim="mlp", only_for={"moe.num_experts": (0,)})
    num_heads: int = option(4, "query heads", minimum=1, dim="heads")
    num_kv_heads: int = option(
        4, "key and value heads; fewer than num_heads is grouped-query attention", minimum=1, dim="kv_heads"
    )
    head_dim: int = option(
        0, "width of a head (in latent attention, without rotary channels); 0: embed_dim / num_heads",
        minimum=0,
    )  # fmt: skip
    latent: LatentOptions = dataclasses.field(
        default_factory=LatentOptions, metadata={"only_for": {"latent.dim": Except(0)}}
    )
    vocab_size: int = option(
        0, "tokens in the vocabulary, without padding; 0: the size of the data's tokenizer (bytes: 257)", minimum=0
    )
    vocab_multiple: int = option(
        128,
        "the vocabulary is padded to a multiple of this number; padding gets no probability",
        minimum=1,
        dim="vocab",
    )
    dropout_rate: float = option(
        0.0, "dropout probability, on embeddings and on the outputs of attention and mlp", minimum=0.0
    )
    positions: str = option("rotary", "encoding of positions", choices=("rotary", "learned"))
    max_positions: int = option(
        0, "rows of learned positions; 0 means sequence_length", minimum=0, only_for={"positions": ("learned",)}
    )
    rope: RopeOptions = dataclasses.field(default_factory=RopeOptions, metadata={"only_for": ROTARY})
    norm: NormOptions = dataclasses.field(default_factory=NormOptions)
    activation: str = option(
        "swiglu",
        "activation function of the mlp: gelu, or gated with silu (swiglu; clamped_swiglu of gpt-oss) or gelu (geglu)",
        choices=("swiglu", "gelu", "geglu", "clamped_swiglu"),
    )
    tied_embeddings: bool = option(False, "the head uses the embedding table")
    scaled_embeddings: bool = option(False, "embeddings of tokens are multiplied by sqrt(embed_dim), as in Gemma")
    biases: bool = option(False, "biases in projections, mlp and LayerNorm")
    qkv_biases: bool = option(False, "biases only on queries, keys and values, as in Qwen 2", only_for=_WITHOUT_BIASES)
    attention_biases: bool = option(
        False, "biases only on the four projections of attention, a key of Llama's", only_for=_WITHOUT_BIASES
    )
    mlp_biases: bool = option(
        False, "biases only on the projections of the mlp, a key of Llama's",
        only_for={**_WITHOUT_BIASES, "moe.num_experts": (0,)},
    )  # fmt: skip
    window: int = option(
        0, "number of tokens that a token attends to, itself included, as in Mistral; 0: all before it", minimum=0
    )
    global_every: int = option(
        0,
        "every n-th layer has no window (2 in Gemma 2, 6 in Gemma 3); 0: all layers have a window",
        minimum=0,
        only_for=_WINDOWED,
    )
    attention_scalar: int = option(
        0, "attention scores are divided by the square root of this number, as in Gemma 2 and 3; 0: of head_dim",
        minimum=0,
    )  # fmt: skip
    attention_cap: float = option(
        0.0, "attention scores become cap tanh(score / cap), as in Gemma 2; 0: no cap", minimum=0.0
    )
    logit_cap: float = option(0.0, "logits become cap tanh(logit / cap), as in Gemma 2; 0: no cap", minimum=0.0)
    sinks: bool = option(False, "attention sinks: a learned score of each head in the softmax, as in gpt-oss")
    moe: MoeOptions = dataclasses.field(
        default_factory=MoeOptions, metadata={"only_for": {"moe.num_experts": Except(0)}}
    )
    init_std: float = option(0.02, "standard deviation of initial weights", minimum=0.0)
    loss_chunk: int = option(
        0, "tokens per device whose logits the loss computes at a time; 0: tokens with logits of 512 MiB", minimum=0
    )
    attention: str = option(
        "auto",
        "implementation of attention: xla, blockwise (linear memory), cudnn (GPU), triton (GPU; supports documents), "
        "splash (TPU; both are interpreted elsewhere, slowly), auto",
        choices=("auto", "xla", "blockwise", "cudnn", "triton", "splash"),
    )
    within_documents: bool = option(True, "tokens of a packed sequence attend only to their own document")

    @property
    def alternates(self) -> bool:
        """Whether every n-th layer has no sliding window while the other layers have one (`global_every` is set)."""
        return self.window > 0 and self.global_every > 0

    @property
    def num_global(self) -> int:
        """The number of layers without a window if only some layers have a window; otherwise 0."""
        return self.num_layers // self.global_every if self.alternates else 0

    @property
    def num_dense(self) -> int:
        """The number of leading layers of a mixture-of-experts model that are dense (no experts); 0 without experts."""
        return self.moe.dense_layers if self.moe.num_experts else 0

    @property
    def num_repeated(self) -> int:
        """The number of identical layers that a pipeline splits into stages: all after the `num_dense` dense layers."""
        return self.num_layers - self.num_dense

    @property
    def of_dense(self) -> "DecoderOptions":
        """The options of the leading dense layers of a mixture-of-experts model.

        They are a copy of these options without experts, and with an mlp of inner width `moe.dense_dim`.
        """
        return dataclasses.replace(self, moe=MoeOptions(), mlp_dim=self.moe.dense_dim)

    @property
    def width_of_head(self) -> int:
        """The width of a query and a key head, including rotary channels."""
        return super().width_of_head + (self.latent.rope_dim if self.latent.dim else 0)

    @property
    def width_of_values(self) -> int:
        """The width of a value head, which differs from a query head in latent attention."""
        return (self.latent.dim and self.latent.value_dim) or super().width_of_head

    @property
    def width_of_rotary(self) -> int:
        """The number of channels of a query or key head that rotary positions rotate."""
        return self.latent.rope_dim if self.latent.dim else self.width_of_head

    @property
    def latent_widths(self) -> Latent | None:
        """The widths of latent attention; None without it."""
        if not self.latent.dim:
            return None
        of = self.latent
        return Latent(of.dim, of.query_dim, of.rope_dim, self.width_of_values, self.norm.epsilon)

    @property
    def share_of_experts(self) -> float:
        """The share of the experts that process a token; 1 without experts."""
        return self.moe.experts_per_token / self.moe.num_experts if self.moe.num_experts else 1.0

    @property
    def attends(self) -> Attention:
        """The settings of a layer's attention."""
        return Attention(
            self.num_heads,
            self.num_kv_heads,
            self.width_of_head,
            self.attention,
            window=self.window,
            scalar=self.attention_scalar,
            cap=self.attention_cap,
            qkv_biases=self.biases or self.qkv_biases or self.attention_biases,
            output_bias=self.biases or self.attention_biases,
            qk_epsilon=self.norm.epsilon if self.norm.qk else None,
            qk_of_all=self.norm.qk_of_all,
            sinks=self.sinks,
            centered_scales=self.norm.centered_scales,
        )
