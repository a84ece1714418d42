"""colibri-lab: understand, measure and tune Mixture-of-Experts inference when the model is bigger than memory.

import colibri_lab as cl
lab = cl.open("data/colibri-tiny", expert_cache_slots=16)
run = lab.generate("def read_lines(path):", max_tokens=64, temperature=0.7)
print(run.text, run.stages, run.cache, sep="\\n")
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "open": ("front", "open_model"),
    "find_model": ("front", "find_model"),
    "about": ("doctor", "about"),
    "convert": ("checkpoint.convert", "convert"),
    "quantize": ("checkpoint.convert", "quantize"),
    "quality_report": ("quality.report", "quality_report"),
    "validate": ("checkpoint.validate", "validate"),
    "load_trace": ("trace", "load_trace"),
    "Lab": ("lab", "Lab"),
    "routers": ("engine.routers", None),
    "routing": ("routing", None),
    "exercises": ("exercises", None),
    "make_model": ("checkpoint.make_model", "make_model"),
    "memory_plan": ("tune.memory_plan", "memory_plan"),
    "probe": ("tune.probe", "probe"),
    "plan": ("tune.plan", "plan"),
    "sweep": ("tune.sweep", "sweep"),
    "compare": ("tune.compare", "compare"),
    "tune": ("tune", None),
    "runs": ("tune.runs", "runs"),
    "kernels": ("kernels", None),
    "ui": ("ui", None),
    "try_edit": ("trial", "try_edit"),
    "errors": ("errors", None),
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    # Names load on first use, so that `import colibri_lab` and `colibri --help` are instant and compile nothing.
    if name not in _HOMES:
        raise AttributeError(f"module 'colibri_lab' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    home = importlib.import_module(f"colibri_lab.{module}")
    value = home if attribute is None else getattr(home, attribute)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)


def load_ipython_extension(ipython) -> None:
    """`%load_ext colibri_lab`: the commands `%kernel_show` and `%%kernel`."""
    from .magic import register

    register(ipython)
