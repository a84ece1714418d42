"""Which settings, and how fast: measure the machine, predict, plan, sweep, compare, tune; and keep a record of each run.

The package is also the function `tuner.tune`, so that `colibri_lab.tune("colibri-tiny", budget="4 GiB")` works whether or
not one of its modules was imported before.
"""

from __future__ import annotations

import sys
import types


class _Callable(types.ModuleType):
    def __call__(self, *args, **settings):
        from .tuner import tune

        return tune(*args, **settings)


sys.modules[__name__].__class__ = _Callable
