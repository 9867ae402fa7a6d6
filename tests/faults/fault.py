"""What a planted fault is; the tables are beside this file."""

import ast


class Fault:
    """One planted fault.

    Attributes:
      path: the file, from the folder of the package.
      before: text that stands in it exactly once.
      after: what replaces it.
      wrong: what goes wrong, for a reader.
      tests: arguments for pytest, from the folder `tests`, each a fast test.
    """

    def __init__(self, path: str, before: str, after: str, wrong: str, *tests: str) -> None:
        self.path, self.before, self.after, self.wrong, self.tests = path, before, after, wrong, tests

    def planted(self, text: str) -> str:
        """Returns the text of the file with the fault in it.

        Raises:
          ValueError: the text to be replaced does not stand there exactly once, or the fault changes no code.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.path}: {count} places read {self.before!r}; wanted: one ({self.wrong})")
        changed = text.replace(self.before, self.after)
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            raise ValueError(f"{self.path}: {self.after!r} changes nothing ({self.wrong})")
        return changed
