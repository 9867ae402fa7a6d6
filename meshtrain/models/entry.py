"""The shape, dtype and logical axes of one array: of a batch, or of a cache."""

import dataclasses

from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a batch or of a cache: its shape, its dtype and its logical axes.

    Attributes:
      shape: of the array on all devices together: [B, ...] in a batch.
      dtype: of its elements.
      axes: a logical axis or None for each dim; in a batch the first of them is "batch". The activation rules map them
        to mesh axes; a dim with None is not split.
      below: integers have to be at least 0 and below this number: the vocabulary of token ids, the number of classes of
        labels. JAX clamps an index that is out of range, so a wrong id would train without a word. 0: any value.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: tuple[str | None, ...]
    below: int = 0
