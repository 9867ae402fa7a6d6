"""Speedup, efficiency and serial share, from seconds and numbers of devices. No JAX.

Throughput r, devices n; those of the base have a 0:

    speedup       r / r0, which at a batch that stays the same is t0 / t
    efficiency    speedup n0 / n
    serial share  s of Amdahl's law (1967), t / t0 = s + (1 - s) n0 / n. Of one measurement it is
                  (1 / speedup - n0 / n) / (1 - n0 / n), as Karp and Flatt (1990) define it; of several the least
                  squares of t / t0. It is negative where the speedup is more than n / n0.
"""

from collections.abc import Sequence


def speedup(rate: float, base_rate: float) -> float:
    """Returns how many times the throughput of the base this is."""
    return rate / base_rate


def efficiency(rate: float, num_devices: int, base_rate: float, base_devices: int) -> float:
    """Returns the throughput of a device, as a share of that of the base."""
    return speedup(rate, base_rate) * base_devices / num_devices


def serial_share(seconds: float, num_devices: int, base_seconds: float, base_devices: int) -> float | None:
    """Returns the serial share that explains one speedup; None for the base itself."""
    ideal = base_devices / num_devices
    if ideal == 1:
        return None
    return (seconds / base_seconds - ideal) / (1 - ideal)


def fitted_serial_share(steps: Sequence[tuple[int, float]]) -> float | None:
    """Returns the serial share that explains several speedups best.

    >>> round(fitted_serial_share([(8, 1.0), (16, 0.55), (32, 0.325)]), 6)
    0.1

    Args:
      steps: (devices, seconds of a step of the same batch), the base first.

    Returns:
      The share; None of less than two.
    """
    if len(steps) < 2:
        return None
    (base_devices, base_seconds), *others = steps
    above = below = 0.0
    for num_devices, seconds in others:
        ideal = base_devices / num_devices
        above += (seconds / base_seconds - ideal) * (1 - ideal)
        below += (1 - ideal) ** 2
    return above / below
