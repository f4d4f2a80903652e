"""`regard.viz.figures` under its public name, so that `import regard.figures` finds it too."""

import sys

from regard.viz import figures
from regard.viz.figures import *  # noqa: F403  what type checkers read

sys.modules[__name__] = figures
