"""Prints README's memory table: bytes of training state on each of eight devices, by ZeRO level.

Bytes of parameters, gradient sums and Adam's moments of the assembled step, without activations; no array is allocated.
"""

import argparse

import jax

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.param_sharding import MAX_LEVEL, ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.device_memory import training_state_bytes

NUM_DEVICES = 8
# Touvron et al. 2023, Llama 2.
MODELS = {
    "Llama 7B": DecoderOptions(
        num_layers=32, embed_dim=4096, mlp_dim=11008, num_heads=32, num_kv_heads=32, vocab_size=32000
    ),
    "Llama 70B": DecoderOptions(
        num_layers=80, embed_dim=8192, mlp_dim=28672, num_heads=64, num_kv_heads=8, vocab_size=32000
    ),
}


def row(name: str, model: DecoderOptions) -> str:
    """Returns one line of the table."""
    cells = []
    for level in range(MAX_LEVEL + 1):
        config = Config(batch_size=NUM_DEVICES, model=model, zero=ZeroOptions(level=level))
        assembly = assemble(config, dict.fromkeys(AXES, 1) | {"data": NUM_DEVICES}, jax.devices())
        cells.append(f"{training_state_bytes(assembly.state, assembly.states.sums).total / 1e9:.1f} GB")
    return f"| {name} | {assembly.task.num_parameters / 1e9:.2f} B | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(prog="scripts/bench memory", description=(__doc__ or "").partition("\n")[0]).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    print("| model | parameters | level 0 | level 1 | level 2 | level 3, or fsdp 8 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, model in MODELS.items():
        print(row(name, model))


if __name__ == "__main__":
    main()
