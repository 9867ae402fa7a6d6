"""Measures the extra host memory of reading a Hugging Face folder (docs/results/speed.md).

It makes a folder of random bfloat16 weights with a Llama's names and reads it onto fsdp. It prints the process's peak
memory minus the arrays, with the bound: the largest stacked leaf divided by the devices, plus 64 MiB.
"""

import argparse
import json
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.hf import folder, names
from meshtrain.launch import distributed
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths, num_bytes

MIB = 1 << 20
ALLOWED_MIB = 64
WIDTH, MLP, HEADS, VOCAB = 2048, 8192, 16, 4096


def example(directory: Path, num_layers: int) -> None:
    """Writes config.json and a file for each layer; the first file also contains the embedding and the head."""
    options = DecoderOptions(num_layers, WIDTH, MLP, HEADS, HEADS, vocab_size=VOCAB)
    size, rng = names.sizes(options), np.random.default_rng(0)
    random = rng.standard_normal(MLP * WIDTH).astype(jnp.bfloat16)
    for layer in range(num_layers):
        tensors = {}
        for weight in names.weights("llama", options):
            if weight.stacks or layer == 0:
                tensors[weight.name.format(layer)] = names.shape_in_file(weight, size)
        header, end = {}, 0
        for name, shape in tensors.items():
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (directory / f"layer-{layer}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for shape in tensors.values():
                file.write(np.resize(random, int(np.prod(shape))).tobytes())
    given = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(given))


def anonymous_bytes() -> int:
    """Returns this process's anonymous memory (not mapped from files), on Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main(argv: Sequence[str]) -> int:
    """Prints the sizes, the extra memory and its bound; returns 1 if the bound is exceeded."""
    parser = argparse.ArgumentParser(prog="scripts/bench hf_memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="approximate size of the folder")
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args(argv)
    devices, _ = distributed.start(arguments.devices)
    layer_bytes = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * MLP)
    with tempfile.TemporaryDirectory() as directory:
        example(Path(directory), max(1, round(arguments.gigabytes * 1e9 / layer_bytes)))
        opened = folder.open_folder(directory)
        config = Config(model=opened.model.options, batch_size=len(devices))
        assembly = assemble(config, dict.fromkeys(AXES, 1) | {"fsdp": len(devices)}, devices)
        like = assembly.states.kept.params
        sizes = [num_bytes(leaf) for _, leaf in leaves_with_paths(like)]
        before, most, ended = anonymous_bytes(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.002):
                most[0] = max(most[0], anonymous_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        start = time.process_time()
        params = jax.block_until_ready(folder.read(opened, like))
        seconds = time.process_time() - start
        ended.set()
        thread.join()
        extra = max(most[0], anonymous_bytes()) - before - sum(sizes)
        del params
    bound = max(sizes) / len(devices) + ALLOWED_MIB * MIB
    read_bytes = sum(sizes) // 2
    print(
        f"{read_bytes / MIB:,.0f} MiB of bfloat16 -> {sum(sizes) / MIB:,.0f} MiB of float32 on {len(devices)} devices"
    )
    print(f"{seconds:.1f} CPU seconds; largest leaf {max(sizes) / MIB:,.0f} MiB")
    print(f"extra host memory {extra / MIB:,.0f} MiB; allowed {bound / MIB:,.0f} MiB (largest leaf / devices + 64)")
    return int(extra > bound)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
