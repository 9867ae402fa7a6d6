"""Planted faults where mesh axes split sequences."""

from scripts.mutant import Mutant

_EXCHANGE = "models/test_models_exchange.py::test_heads_are_split_in_place_of_the_sequence"

CONTEXT: tuple[Mutant, ...] = (
    Mutant(
        "heads in another order",
        "models/exchange.py",
        "jax.lax.all_to_all(heads, axes, 1, 2, tiled=True)",
        "jax.lax.all_to_all(heads, axes, 1, 2, tiled=True)[:, :, ::-1]",
        "heads come back from the exchange of sequences in the wrong order",
        (f"{_EXCHANGE}[as many]",),
    ),
    Mutant(
        "no inverse exchange",
        "models/exchange.py",
        "jax.lax.all_to_all(heads, axes, 1, 2, tiled=True)",
        "heads.reshape(heads.shape[0], -1, num_parts * heads.shape[2], heads.shape[3])",
        "attention's output stays split by heads, where the next product takes it for a part of the sequence",
        (f"{_EXCHANGE}[as many]",),
    ),
    Mutant(
        "documents of one part",
        "models/exchange.py",
        "jax.lax.all_gather(x, axes, axis=1, tiled=True)",
        "jax.numpy.tile(x, (1, jax.lax.axis_size(axes)))",
        "a device takes the documents of its part of a sequence for those of the others",
        (f"{_EXCHANGE}[as many]",),
    ),
    Mutant(
        "repeated heads in turns",
        "models/exchange.py",
        "jnp.repeat(x.astype(jnp.float32), times, axis=2)",
        "jnp.tile(x.astype(jnp.float32), (1, 1, times, 1))",
        "key heads that are repeated for more devices go to the wrong query heads",
        (f"{_EXCHANGE}[repeated where 6 divides no 4]",),
    ),
    Mutant(
        "every part is the first",
        "models/exchange.py",
        'place = {"first": jax.lax.axis_index(axes) * q.shape[1]} if causal else {}',
        'place = {"first": 0 * jax.lax.axis_index(axes)} if causal else {}',
        "where keys are gathered, each part of the queries is masked as the first one",
        ("models/test_models_exchange.py::test_keys_are_gathered_where_there_is_no_head_for_each_device[xla-0]",),
    ),
    Mutant(
        "blocks of part of a sequence are skipped",
        "models/blockwise.py",
        "if not self.causal or self.is_part:",
        "if not self.causal:",
        "attention in blocks leaves out keys before a part of the sequence",
        ("models/test_models_exchange.py::test_keys_are_gathered_where_there_is_no_head_for_each_device[blockwise-0]",),
    ),
    Mutant(
        "repeated exchanges are free",
        "plan/exchange.py",
        "(PASSES + again)",
        "PASSES",
        "attention's exchange is said to be sent once where the backward pass repeats it",
        (
            "plan/test_plan_exchange.py::test_an_exchange_sends_queries_keys_values_and_heads_each_pass"
            "[{'context': 2}-4-RematOptions(policy='full', every=1)-48.0]",
        ),
    ),
    Mutant(
        "exchange among weights",
        "plan/collectives.py",
        "and row.axis not in (CONTEXT, EXPERT, TENSOR)",
        "and row.axis not in (EXPERT, TENSOR)",
        "what attention exchanges is said to be sent for weights",
        ("plan/test_plan_exchange.py::test_what_runs_along_context_alone_is_not_sent_for_weights",),
    ),
)
