"""The forward pass. Read `Engine._forward` first: it is the whole pipeline."""

from __future__ import annotations

import contextlib

import numpy as np

from .. import kernels
from ..cache.expert_cache import ExpertCache
from ..checkpoint.container import Container
from ..errors import ContainerError
from ..telemetry import Recorder
from .attention import Attention, Rotary
from .experts import DenseFeedForward, RoutedExperts, SharedExpert
from .kv_cache import KvCache
from .linear import Linear
from .router import Router
from .routers import RouterHook, chosen_only, decide
from .workspace import Workspace


class Layer:
    """One transformer layer: its parts, as the model's switches say."""

    attention: Attention
    router: Router | None = None
    experts: RoutedExperts | None = None
    shared: SharedExpert | None = None
    dense: DenseFeedForward | None = None


class Engine:
    """A container's weights, ready to run. One sequence at a time; not thread-safe.

    `observers` are called as observer(layer, ids, weights, lease) after every routing decision. `routing` is the router
    in the place of the model's own, or None; ids may contain PAD then (routers.py).
    """

    def __init__(self, container: Container, settings: dict, recorder: Recorder | None = None):
        self.container, self.config, self.settings = container, container.config, settings
        self.work, self.recorder, self.observers = Workspace(), recorder, []
        self.routing: RouterHook | None = None
        self.layers = [self._layer(i) for i in range(self.config.num_layers)]
        self._embed = container.dense("embed").tensors["embed"]
        self._norm = container.dense("final").tensors["norm"].array()
        head = container.dense("embed" if self.config.tied_embeddings else "head")
        self._head = self._linear(head, "embed" if self.config.tied_embeddings else "head")
        self._rms_norm = kernels.load("norm").rms_norm
        self.cache = ExpertCache(container, settings)
        routers = [layer.router for layer in self.layers if layer.router]
        self._lookahead = [r.copy_for("ahead") for r in routers] if settings["prefetch"] == "lookahead" else None
        self.kv = self.new_kv()

    def forward(self, ids: np.ndarray, phase: str, every: bool = False) -> np.ndarray:
        """ids (tokens,) → logits float32: (1, vocab) of the last token, or (tokens, vocab) when `every` is set."""
        try:
            return self._forward(ids, phase, every)
        except BaseException:
            self.cache.abandon()
            raise

    def _forward(self, ids: np.ndarray, phase: str, every: bool) -> np.ndarray:
        tokens = len(ids)
        self.kv.reserve(tokens)
        self.tokens = ids
        with self.stage("embed"):
            x = self._embed.gather(ids)  # (tokens, hidden)
            self._rotary.upto(self.kv.length + tokens)
        for layer in self.layers:
            with self.stage("attention"):
                x += layer.attention(self._normed(x, layer.input_norm), self.kv)
                h = self._normed(x, layer.post_norm)
            if layer.dense:
                with self.stage("expert_compute"):
                    x += layer.dense(h, "dense_out")
                continue
            with self.stage("router"):
                experts, weights = layer.router(h) if self.routing is None else self._reroute(layer, h, ids)
            asked = (experts, weights) if self.routing is None else chosen_only(experts, weights)
            lease = self.cache.acquire(layer.moe_index, *asked, phase)
            for observer in self.observers:
                observer(layer.index, experts, weights, lease)
            if self._lookahead is not None:
                self._fetch_ahead(layer.moe_index, h, phase)
            with self.stage("expert_compute"):
                layer.experts.bucket(h, experts, lease.experts)
                layer.experts.run(self.cache.memory, *lease.resident())
            while lease.pending:
                with self.stage("expert_load_wait"):
                    loaded = lease.wait()
                with self.stage("expert_compute"):
                    layer.experts.run(self.cache.memory, *loaded)
            with self.stage("expert_compute"):
                x += layer.experts.combine(weights)
            if layer.shared and getattr(self.routing, "shared", True):
                with self.stage("shared_expert"):
                    x += layer.shared(h)
        self.kv.advance(tokens)
        with self.stage("head"):
            last = x if every else x[-1:]
            return self._head(self._normed(last, self._norm))

    def _reroute(self, layer: Layer, h: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The choice of the router that stands in for the model's."""
        logits = layer.router.logits(h) if getattr(self.routing, "needs_logits", True) else None
        return decide(self.routing, layer.router.seen(ids, self.kv.length), logits)

    @contextlib.contextmanager
    def routed_by(self, router: RouterHook | None):
        """Until the block ends, `router` decides; None is the model's own."""
        before, self.routing = self.routing, router
        try:
            yield
        finally:
            self.routing = before

    def _fetch_ahead(self, layer: int, h: np.ndarray, phase: str) -> None:
        """Lookahead: the next layer's router, run early on this layer's input."""
        if layer + 1 < len(self._lookahead):
            ids, _ = self._lookahead[layer + 1](h)
            blocks = dict.fromkeys((ids.reshape(-1) // self.container.block_size).tolist())
            self.cache.prefetch(layer + 1, list(blocks)[: self.cache.prefetcher.budget], phase)

    def stage(self, name: str):
        return self.recorder.stage(name) if self.recorder else contextlib.nullcontext()

    def new_kv(self) -> KvCache:
        c, s = self.config, self.settings
        return KvCache(c.num_layers, c.num_kv_heads, c.head_dim, s["max_seq_len"], s["kv_cache_type"], s["page_size"])

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        out = self.work.take("normed", x.shape)
        self._rms_norm(x, weight, self.config.rms_norm_eps, out, self.settings["threads"])
        return out

    def _linear(self, file, name: str) -> Linear:
        bias = file.tensors.get(f"{name}_bias")
        options = {name: value for name, value in self._ffn_options.items() if name != "exact"}
        return Linear(file.payload, file.tensors[name], options, None if bias is None else bias.array())

    @property
    def _ffn_options(self) -> dict:
        s = self.settings
        return dict(
            threads=s["threads"], block_size=s["gemm_block_size"], exact=s["sigmoid"] == "exact",
            int8_activations=s["activations"] == "int8",
        )  # fmt: skip

    def _layer(self, index: int) -> Layer:
        c, file, layer = self.config, self.container.dense(f"layer_{index}"), Layer()
        if index == 0:
            self._rotary = Rotary(c.rope)
        tensors = file.tensors
        weights = {name: self._linear(file, name) for name in "qkvo"}
        weights |= {name: tensors[name].array() for name in ("q_norm", "k_norm") if name in tensors}
        layer.index, layer.nbytes = index, file.payload.nbytes
        layer.input_norm, layer.post_norm = tensors["input_norm"].array(), tensors["post_norm"].array()
        layer.attention = Attention(c, index, weights, self._rotary, self.work, self.settings["threads"])
        if c.ffn[index] == "dense":
            layer.dense = self._dense_ffn(file, "")
            return layer
        layer.moe_index = c.moe_layers.index(index)
        router = self.container.router(index)
        bias = router.tensors.get("correction_bias")
        layer.router = Router(
            index, c.router, c.top_k, self._linear(router, "router"), None if bias is None else bias.array(), self.work,
            self.settings["threads"],
        )  # fmt: skip
        layer.experts = RoutedExperts(self._block_tables(index), c.num_experts, self.work, self._ffn_options)
        if c.shared != "none":
            score = self._linear(file, "shared_router") if c.shared == "gated" else None
            layer.shared = SharedExpert(self._dense_ffn(file, "shared_"), score)
        return layer

    def _dense_ffn(self, file, prefix: str) -> DenseFeedForward:
        parts = [file.tensors[prefix + name] for name in ("gate", "up", "down")]
        return DenseFeedForward(file.payload, *parts, self.work, self._ffn_options)

    def _block_tables(self, layer: int) -> list[tuple[dict, ...]]:
        tables = []
        for block in range(self.container.blocks):
            header = self.container.block_layout(layer, block)
            if header.table is None:
                raise ContainerError(
                    f"{header.path}: a version-0 block is a plain row-major stream that cannot be computed from a slot; "
                    "convert the checkpoint again to get version 1"
                )
            tables.append(header.table)
        return tables
