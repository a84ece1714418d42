"""Recording from a transformers model while it runs, through forward hooks on its routers. torch is never imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ...errors import TraceError
from ..record import TraceRecorder

_ROUTER = re.compile(r"(Router|Gate)$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@contextmanager
def record_transformers(model, config=None, **header) -> Iterator[TraceRecorder]:
    """`with record_transformers(model) as rec: model.generate(…)`, then `rec.trace`.

    Routers that return (logits, weights, ids), as transformers' do since version 5, are taken at their word. For those
    that return logits only, pass `config` (a `ModelConfig`): the family's own router maths is then applied. A forward
    pass over several tokens per text is prefill; rows that the attention mask marks as padding are left out. A pass
    without a past starts new texts (sequences).
    """
    from .arrays import model_config

    found = [(name, module) for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]
    routers = {name: (int(m[1]), module) for name, module in found if (m := _LAYER.search(name + "."))}
    if not routers:
        raise TraceError(
            f"{type(model).__name__} has no router that can be recorded: expected modules named …Router or …Gate "
            "inside numbered layers; is this a mixture-of-experts model?"
        )
    hf = getattr(model, "config", None)
    recorder = TraceRecorder(**{
        "model": getattr(hf, "name_or_path", None) or type(model).__name__,
        "engine": "transformers",
        "capture": "record_transformers",
        "num_experts": _attribute(hf, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "ranked": None,
        **header,
    })  # fmt: skip
    run = _Run(recorder, None if config is None else model_config(config))
    hooks = [model.register_forward_pre_hook(run.begin, with_kwargs=True)]
    hooks += [module.register_forward_hook(run.router(layer)) for layer, module in routers.values()]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def _attribute(config, *names: str):
    text = getattr(config, "text_config", config)
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


class _Run:
    """State between the hooks of one recording: the batch that is running, and its step number."""

    def __init__(self, recorder: TraceRecorder, config):
        self.recorder, self.config = recorder, config
        self.step, self.ids, self.keep = -1, None, None
        self.texts, self.batch = 0, 0  # sequence number of the batch's first text; texts in the batch

    def begin(self, _module, args, kwargs):
        """Before each forward pass of the whole model: remember token ids and padding."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.step += 1
        self.ids = self.keep = None
        if ids is None:  # called with embeddings: the shape comes from the routers
            return
        self.ids = _numpy(ids)
        self.keep = np.ones(self.ids.shape, bool)
        batch, width = self.ids.shape
        mask = kwargs.get("attention_mask")
        past = kwargs.get("past_key_values", kwargs.get("cache"))  # its name depends on the version
        continued = past is not None and (not hasattr(past, "get_seq_length") or past.get_seq_length() > 0)
        if mask is not None and getattr(mask, "ndim", 0) == 2:  # covers the past too; the last columns are this pass
            self.keep = _numpy(mask)[:, -width:] != 0
            continued |= mask.shape[1] > width
        if not continued:
            self.texts += self.batch
        self.batch = batch

    def router(self, layer: int):
        def hook(_module, _args, output):
            if self.step < 0:
                raise TraceError("a part of the model was called on its own; record the module that is called instead")
            ids, weights = self.choice(layer, output)
            batch, width = self.ids.shape if self.ids is not None else (1, len(ids))
            if len(ids) != batch * width:
                raise TraceError(f"layer {layer}: the router saw {len(ids)} tokens, the model {batch} x {width}")
            keep = np.ones(len(ids), bool) if self.keep is None else self.keep.reshape(-1)
            if not keep.any():
                return
            self.recorder.add(
                step=self.step,
                layer=layer,
                phase="prefill" if width > 1 else "decode",
                sequence=self.texts + np.repeat(np.arange(batch), width)[keep],
                tokens=None if self.ids is None else self.ids.reshape(-1)[keep],
                experts=ids[keep],
                weights=None if weights is None else weights[keep],
            )

        return hook

    def choice(self, layer: int, output) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids (tokens, k) and weights (tokens, k) from whatever the router returned."""
        if isinstance(output, tuple) and len(output) == 3:
            logits, weights, ids = (_numpy(value) for value in output)
            if ids.dtype.kind in "iu" and ids.ndim == 2:
                if weights.shape == ids.shape:
                    return ids, weights
                if weights.shape == logits.shape == (len(ids), weights.shape[-1]):  # scattered over all experts
                    return ids, np.take_along_axis(weights, ids, 1)
                return ids, None
        logits = _numpy(output[0] if isinstance(output, tuple) else output)
        if self.config is None or logits.ndim < 2 or logits.shape[-1] != self.config.num_experts:
            raise TraceError(
                f"layer {layer}: the router returned {_describe(output)}; expected (logits, weights, ids), "
                "or logits (tokens, experts) together with config="
            )
        if self.config.router.correction_bias:
            raise TraceError(f"layer {layer}: this family chooses by a correction bias that its logits do not contain")
        from ...engine.router_reference import route_numpy

        return route_numpy(logits.reshape(-1, logits.shape[-1]), self.config.router, self.config.top_k)


def _describe(output) -> str:
    parts = output if isinstance(output, tuple) else (output,)
    return ", ".join(f"{type(part).__name__} {tuple(getattr(part, 'shape', ()))}" for part in parts)


def _numpy(tensor) -> np.ndarray:
    """A torch tensor of any type and device (or anything array-like) as numpy."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()  # numpy has no bfloat16
        tensor = tensor.numpy()
    return np.asarray(tensor)
