"""`python -m colibri_lab` is the `colibri` command."""

import sys

from .cli import main

sys.exit(main())
