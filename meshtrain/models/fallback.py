"""Describes slower implementations that replace kernels, so that `train` and `plan` report every replacement."""

from typing import NamedTuple

import jax

# Changes after which a kernel is used. A test fails if a newer JAX is installed, so that this version is updated.
WITH_KERNELS = "jax 0.12.0.1"
NEWER_GPU = "a GPU of compute capability 8.0 or newer (A100)"


class Fallback(NamedTuple):
    """An implementation that computes a part of a model more slowly than a kernel would.

    Attributes:
      by: name of the implementation, such as `blockwise`.
      why: reason why no kernel computes this part.
      cost: the cost of the replacement, such as `about 23 % of the kernel's speed`.
      change: a change of the configuration, of the installed JAX or of the device, after which a kernel is used.
    """

    by: str
    why: str
    cost: str
    change: str

    @property
    def what(self) -> str:
        """The replacement, its reason and its cost, as text."""
        return f"{self.by}, because {self.why}: {self.cost}"

    def line(self, part: str) -> str:
        """Returns the line that `train` prints about a part of the model, such as `attention`."""
        return f"{part}: {self.what}; nearest: {self.change}"


def missing(kernel: str) -> str:
    """Returns the reason that the installed JAX lacks a kernel, such as `JAX 0.13 has no Pallas kernel`."""
    return f"JAX {jax.__version__} has no {kernel}"
