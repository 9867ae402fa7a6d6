"""Planted faults in which tokens come next."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "generation/sampling.py",
        "return fold(fold(jnp.broadcast_to(key, prompts.shape), prompts), samples)",
        "return fold(jnp.broadcast_to(key, prompts.shape), prompts)",
        "all samples of a prompt are the same text",
        "generation/test_generation_sampling.py::test_random_numbers_depend_on_prompt_sample_and_position_alone",
    ),
    # Once no test noticed these.
    Fault(
        "generation/window.py",
        "jnp.take_along_axis(of_all, (filled - 1)[:, None, None], axis=1)",
        "jnp.take_along_axis(of_all, (filled - 2)[:, None, None], axis=1)",
        "each token follows the one before the last",
        "generation/test_generation_window.py::test_each_token_follows_those_in_its_window",
    ),
    Fault(
        "generation/window.py",
        "window = jnp.where(is_full[:, None], jnp.roll(window, -1, axis=1), window)",
        "window = jnp.where(is_full[:, None], window, window)",
        "once the window is full only its last token changes",
        "generation/test_generation_window.py::test_each_token_follows_those_in_its_window",
    ),
)
