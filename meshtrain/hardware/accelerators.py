"""Published peaks of accelerators, by `jax.Device.device_kind`. Imports no JAX.

All rates are peaks per JAX device (a chip for these TPUs, a card for GPUs), dense: without the factor of two for
sparsity that many data sheets include.
"""

import dataclasses

# The names of a GPU's platform: in `jax.Device.platform`, and of the CUDA plugin.
GPU = ("gpu", "cuda")
# The compute capability of an NVIDIA GPU, such as (9, 0).
Capability = tuple[int, int]
OLDEST_CAPABILITY: Capability = (8, 0)  # A100: Pallas and cuDNN's attention support no older GPUs


def runs_kernels(capability: Capability | None) -> bool:
    """Returns whether a GPU runs the kernels of attention and experts; None, an unknown capability, counts as true."""
    return capability is None or capability >= OLDEST_CAPABILITY


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The published peaks of one device.

    Attributes:
      name: the short name that users write, such as `h100`.
      device_kinds: the values of `jax.Device.device_kind` that this device may have.
      bfloat16_flops_per_second: the rate of dense matrix multiplications of bfloat16 inputs; float16 has the same peak
        on GPUs.
      memory_bytes: the size of device memory.
      memory_bytes_per_second: the rate of reads and writes of device memory together.
      num_links: the number of fast links of one device (NVLink to the switch, ICI to the neighbors in the torus).
      link_bytes_per_second: the rate at which one device can send over all of its fast links together, in one
        direction.
      product_share: the share of the peak that large 16-bit matrix products reach while the card runs at full power.
      source: the publication of the numbers.
      product_source: the source of `product_share`, or the basis of the assumption.
      float32_flops_per_second: the rate of dense matrix multiplications of float32 inputs rounded to TF32, XLA's
        default on NVIDIA GPUs; None if not published (a TPU multiplies float32 in passes of bfloat16).
      float8_flops_per_second: the rate of dense matrix multiplications of two 8-bit floats; None if not supported or
        not published.
      network_bytes_per_second: the rate at which one device's share of its host can send to other hosts (GPU) or other
        slices (TPU), in one direction; None if not published.
      num_units: the number of streaming multiprocessors of a GPU, which compute tiles of products; 0 for a TPU.
    """

    name: str
    device_kinds: tuple[str, ...]
    bfloat16_flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    num_links: int
    link_bytes_per_second: float
    product_share: float
    source: str
    product_source: str
    float32_flops_per_second: float | None = None
    float8_flops_per_second: float | None = None
    network_bytes_per_second: float | None = None
    num_units: int = 0


# NVIDIA's memory_bytes is the driver's value, from openxla/xla xla/backends/gpu/target_config/specs/*.txtpb: a data
# sheet's 80 GB is neither 80e9 bytes nor 80 GiB. GB of memory in Google's tables means GiB (JAX's table,
# jax/_src/pallas/mosaic/tpu_info.py, has 17.2e9 bytes for v5e's 16 GB). If a table counts a link in both directions,
# half of its rate is used here.
ACCELERATORS = (
    Accelerator(
        name="a100-80",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        bfloat16_flops_per_second=312e12,
        float32_flops_per_second=156e12,
        memory_bytes=85_100_068_864,
        memory_bytes_per_second=2.039e12,
        num_links=12,
        link_bytes_per_second=300e9,
        network_bytes_per_second=25e9,
        product_share=0.80,
        num_units=108,
        source="NVIDIA A100 data sheet (SXM, 80 GB); network: DGX A100, one 200 Gb/s adapter a GPU",
        product_source="between fits to one (0.77) and to all (0.87) steps of Korthikanti et al. 2022; best shape 268 "
        "of 312 TFLOP/s (Bekman, Machine Learning Engineering)",
    ),
    Accelerator(
        name="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        bfloat16_flops_per_second=989.4e12,
        float32_flops_per_second=494.7e12,
        float8_flops_per_second=1978.9e12,
        memory_bytes=84_942_979_072,
        memory_bytes_per_second=3.352e12,
        num_links=18,
        link_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        product_share=0.73,
        num_units=132,
        source="NVIDIA H100 architecture white paper (SXM5); network: DGX H100, one 400 Gb/s adapter a GPU",
        product_source="shapes of language models: 720 of 989 TFLOP/s (SemiAnalysis, MI300X vs H100 vs H200, part "
        "1); best shape 794 (Bekman, Machine Learning Engineering)",
    ),
    Accelerator(
        name="h200",
        device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),
        bfloat16_flops_per_second=989.4e12,
        float32_flops_per_second=494.7e12,
        float8_flops_per_second=1978.9e12,
        memory_bytes=151_397_597_184,
        memory_bytes_per_second=4.8e12,
        num_links=18,
        link_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        product_share=0.73,
        num_units=132,
        source="NVIDIA H200 data sheet (SXM; computes as an H100); network: DGX H200, one 400 Gb/s adapter a GPU",
        product_source="as the H100 (SemiAnalysis, MI300X vs H100 vs H200, part 1)",
    ),
    Accelerator(
        name="b200",
        device_kinds=("NVIDIA B200",),
        bfloat16_flops_per_second=2250e12,
        float32_flops_per_second=1100e12,
        float8_flops_per_second=4500e12,
        memory_bytes=191_514_411_008,
        memory_bytes_per_second=7.672e12,
        num_links=18,
        link_bytes_per_second=900e9,
        network_bytes_per_second=50e9,
        product_share=0.67,
        num_units=148,
        source="NVIDIA Blackwell architecture brief (HGX B200, 1000 W); memory: the openxla/xla file above; "
        "network: DGX B200, one 400 Gb/s adapter a GPU",
        product_source="feed-forward shapes of a 7B: 1,448 to 1,562 of 2,250 TFLOP/s (arXiv:2604.23466); best shape "
        "1,745 (Bekman, Machine Learning Engineering)",
    ),
    Accelerator(
        name="v4",
        device_kinds=("TPU v4",),
        bfloat16_flops_per_second=275e12,
        memory_bytes=32 * 2**30,
        memory_bytes_per_second=1.2e12,
        num_links=6,
        link_bytes_per_second=300e9,
        network_bytes_per_second=6.25e9,
        product_share=0.75,
        source="cloud.google.com/tpu/docs/v4; links: six of 50 GB/s, Jouppi et al. 2023 (arXiv:2304.01433), table 4; "
        "network: assumed as the v5p's",
        product_source="assumed",
    ),
    Accelerator(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        bfloat16_flops_per_second=197e12,
        memory_bytes=16 * 2**30,
        memory_bytes_per_second=819e9,
        num_links=4,
        link_bytes_per_second=200e9,
        network_bytes_per_second=3.125e9,
        product_share=0.75,
        source="cloud.google.com/tpu/docs/v5e; network: 6.4 Tb/s for a pod of 256",
        product_source="assumed; MaxText's complete steps reach 0.67 (its README, 32B on a v5e-256)",
    ),
    Accelerator(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        bfloat16_flops_per_second=459e12,
        memory_bytes=95 * 2**30,
        memory_bytes_per_second=2.765e12,
        num_links=6,
        link_bytes_per_second=600e9,
        network_bytes_per_second=6.25e9,
        product_share=0.75,
        source="cloud.google.com/tpu/docs/v5p; network: 50 Gb/s a chip",
        product_source="assumed; MaxText's complete steps reach 0.71 (its README, 32B on a v5p-128)",
    ),
    Accelerator(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        bfloat16_flops_per_second=918e12,
        memory_bytes=32 * 2**30,
        memory_bytes_per_second=1.64e12,
        num_links=4,
        link_bytes_per_second=400e9,
        network_bytes_per_second=12.5e9,
        product_share=0.75,
        source="cloud.google.com/tpu/docs/v6e; network: 25.6 Tb/s for a pod of 256",
        product_source="assumed",
    ),
)


def find(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with this `jax.Device.device_kind`, or None if its peaks are unknown (any CPU).

    The complete name must match: "NVIDIA H100 PCIe", "NVIDIA GH200 480GB" or a slice such as "... MIG 1g.10gb" are
    other devices with other peaks.
    """
    return next((accelerator for accelerator in ACCELERATORS if device_kind in accelerator.device_kinds), None)


def peak_flops_per_second(device_kind: str, dtype: str) -> float | None:
    """Returns one device's peak for matrix multiplications, in FLOP/s, or None if it is unknown.

    Args:
      device_kind: the value of `jax.Device.device_kind`.
      dtype: the dtype of the inputs: "bfloat16", "float16", "float32", or "fp8" for two 8-bit floats. The result is
        None for other dtypes, and for float16 on a TPU, which does not multiply it natively.
    """
    accelerator = find(device_kind)
    if accelerator is None:
        return None
    if dtype == "float32":
        return accelerator.float32_flops_per_second
    if dtype == "fp8":
        return accelerator.float8_flops_per_second
    is_native = dtype == "bfloat16" or (dtype == "float16" and not device_kind.startswith("TPU"))
    return accelerator.bfloat16_flops_per_second if is_native else None


# Memory of a GPU that a program cannot use: the CUDA context, NCCL's buffers, the libraries' workspaces, and the
# allocator's fragmentation. An estimate, not a measurement.
GPU_RUNTIME_BYTES = 2 * 2**30
GPU_MEMORY_FRACTION = 0.95
# This variable sets the share of a GPU's memory that JAX allocates (docs.jax.dev, GPU memory allocation). By default it
# is three quarters. `POOL_FRACTION` is enough for `usable_bytes` on each of the cards above; runs start with it.
FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# JAX raises an error if both variables are set.
FRACTION_VARIABLES = (FRACTION_VARIABLE, "XLA_CLIENT_MEM_FRACTION")
DEFAULT_MEMORY_FRACTION = 0.75
POOL_FRACTION = 0.94
# libtpu reserves this memory of each chip: it offers 15.75 of v5e's 16 GiB.
TPU_RUNTIME_BYTES = 2**28


def usable_bytes(accelerator: Accelerator) -> int:
    """Returns the bytes that a program can use: all memory minus the share of the runtime and the allocator.

    On a GPU this requires that JAX may allocate the fraction `POOL_FRACTION` of the memory; runs set this fraction.
    """
    if accelerator.device_kinds[0].startswith("TPU"):
        return accelerator.memory_bytes - TPU_RUNTIME_BYTES
    return int(GPU_MEMORY_FRACTION * (accelerator.memory_bytes - GPU_RUNTIME_BYTES))
