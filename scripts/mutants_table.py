"""Faults that a change could plant by mistake, each a small replacement in one file, and the fast tests that notice.

A fault belongs to the room of its file. `was_unnoticed` marks those that no test noticed before the table was made.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
      name: a few words that tell it from the others.
      path: the file, from the repository's root.
      before: text that stands in it exactly once.
      after: what replaces it.
      fault: what goes wrong, for a reader.
      tests: at most two arguments for pytest, each a file or a test of the fast suite.
      was_unnoticed: whether the whole fast suite passed with this fault when the table was begun.
    """

    name: str
    path: str
    before: str
    after: str
    fault: str
    tests: tuple[str, ...]
    was_unnoticed: bool = False

    @property
    def room(self) -> str:
        """The folder below the package, or the file's name where it stands at the package's root."""
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else parts[1].removesuffix(".py")


MUTANTS: tuple[Mutant, ...] = ()
