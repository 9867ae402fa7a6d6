"""Planted faults where mesh axes split sequences."""

from scripts.mutant import Mutant

CONTEXT: tuple[Mutant, ...] = (
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
        "and row.axis != CONTEXT",
        "and row.axis",
        "what attention exchanges is said to be sent for weights",
        ("plan/test_plan_exchange.py::test_what_runs_along_context_alone_is_not_sent_for_weights",),
    ),
)
