"""The configuration: the options of all packages in one frozen dataclass, checked together.

Each package declares its own options. Here they are combined, filled from a file, a notebook or the command line, and
checked against each other, the data and the mesh, with all problems reported at once. Tasks are found by name. Further
tables list options without effect and options that may change when a run resumes. `version_0_2` reads the configuration
of a run of version 0.2.
"""

from meshtrain.config.build import default as default
from meshtrain.config.resolve import resolve as resolve
from meshtrain.config.schema import Config as Config
