"""Reports facts about an assembly (arrays, parameter counts, throughput), and converts parameters to layer order."""

import jax

from meshtrain.assembly.assemble import Assembly
from meshtrain.hardware.accelerators import peak_flops_per_second
from meshtrain.models.task import Params
from meshtrain.observe.throughput import Throughput
from meshtrain.sharding.placement_text import Row, rows
from meshtrain.sharding.trees import leaves_with_paths, select
from meshtrain.step.precision import product_name
from meshtrain.step.shardings import reshaper


def array_rows(assembly: Assembly) -> list[Row]:
    """Returns a table row for each array of the state, with its shape and sharding, for `layout.txt` and `explain`."""
    trained = leaves_with_paths(assembly.placed.replicas.trained)
    frozen = {f"params/{path}" for path, is_trained in trained if not is_trained}
    return rows(assembly.state, assembly.states.names, frozen)


def num_trained(assembly: Assembly) -> tuple[int, int]:
    """Returns the number of trained parameters and the number of frozen parameters, without padding layers."""
    trained, frozen = select(assembly.states.kept.params, assembly.placed.replicas.trained)
    return sum(leaf.size for leaf in jax.tree.leaves(trained)), sum(leaf.size for leaf in jax.tree.leaves(frozen))


def parameters_text(assembly: Assembly) -> str:
    """Returns the number of parameters as text; if some are frozen, with the number of trained parameters.

    The text also states if weights are stored in bfloat16 only.
    """
    trained, frozen = num_trained(assembly)
    beside = f", {trained:,} of them trained" if frozen else ""
    if assembly.config.precision.param_dtype == "bfloat16":
        beside += "; weights are bfloat16 without a float32 copy, with stochastic rounding (precision.param_dtype)"
    return f"{assembly.task.parameters_text}{beside}"


def stored_params(assembly: Assembly, kept_params: Params) -> Params:
    """Converts parameters from layer order, which checkpoints use, to their shapes and shardings on the devices."""
    return reshaper(assembly.states.kept.params, assembly.state.params, assembly.placed.stack)(kept_params)


def kept_params(assembly: Assembly, params: Params) -> Params:
    """Converts parameters from their shapes on the devices to layer order; the inverse of `stored_params`."""
    return reshaper(assembly.state.params, assembly.states.kept.params, assembly.placed.stack)(params)


def throughput_of(assembly: Assembly) -> Throughput:
    """Returns the constants that convert seconds per step to throughput and utilization (MFU)."""
    task, device = assembly.task, assembly.mesh.devices.flat[0]
    return Throughput(
        unit=task.unit,
        units_per_step=task.num_units,
        flops_per_unit=task.flops_per_token,
        num_devices=assembly.mesh.size,
        peak_flops_per_second=peak_flops_per_second(device.device_kind, product_name(assembly.config.precision)),
    )
