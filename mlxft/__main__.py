"""`python -m mlxft`, the same as `mlxft`."""

import sys

from mlxft.cli import main

sys.exit(main())
