"""The configuration: the options of all packages in one frozen dataclass, checked together.

Each room declares its own options; here they are summed, filled from a file, a notebook or the command line, and
checked against each other, the data and the mesh, with all problems at once. Tasks are found by name. Further tables
say which options have no effect, which may change when a run resumes, and what became of the keys of former versions.
"""

from meshtrain.config.config import Config as Config
from meshtrain.config.config import default as default
from meshtrain.config.config import resolve as resolve
