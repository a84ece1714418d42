"""What routers do with text: which experts fire for which domain, what that is worth, what other routing would cost.

    readings = routing.read_domains(lab)                # six domains of text, read once
    routing.specialisation(readings)                    # layer by layer: do experts know domains?
    routing.sweep(lab, {"k = 2": routers.TopK(k=2)}, readings)  # loss by domain under another router

A `Reading` holds what every router saw, so decisions can be made again by any rule without running the model. Losses are
mean negative log likelihoods in nats per token, teacher-forced, of texts that the model was not trained on.
"""

from .domains import balance, favourites, frequency_table, specialisation, trace_of, usage
from .experiments import bias_in_weight, divergence, flips, losses, margins, masking, sweep, without_experts
from .reading import Reading, read, read_domains, split, texts
from .rules import parameters, rules

__all__ = [
    "Reading",
    "balance",
    "bias_in_weight",
    "divergence",
    "favourites",
    "flips",
    "frequency_table",
    "losses",
    "margins",
    "masking",
    "parameters",
    "read",
    "read_domains",
    "rules",
    "specialisation",
    "split",
    "sweep",
    "texts",
    "trace_of",
    "usage",
    "without_experts",
]
