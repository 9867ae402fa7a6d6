"""What a planted fault is; they stand in `mutants_step.py` and its siblings; `mutants_run.py` plants them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
      name: a few words that tell it from the others.
      path: the file, from the folder of the package.
      before: text that stands in it exactly once.
      after: what replaces it.
      fault: what goes wrong, for a reader.
      tests: at most two arguments for pytest, from the folder `tests`, each a test of the fast suite.
      was_unnoticed: whether the tests of its room, and parity where it concerns a mesh, passed with this fault when the
        table was begun, or the fault itself was in the code.
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
        """The folder of the file; `root` for the files of the package's root."""
        return self.path.rpartition("/")[0] or "root"
