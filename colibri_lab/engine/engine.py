"""The forward pass. Read `Engine._forward` first: it is the whole pipeline."""

from __future__ import annotations

import contextlib

import numpy as np

from .. import kernels
from ..cache.expert_cache import ExpertCache
from ..checkpoint.container import BinFile, Container
from ..errors import ContainerError, MemoryPlanError, SettingError
from ..telemetry import Recorder
from ..units import parse_size
from . import numpy_kernels
from .attention import Attention, Rotary
from .experts import DenseFeedForward, RoutedExperts, SharedExpert
from .kv_cache import KvCache, KvPages
from .linear import Linear
from .memory import BLOCK, NEARLY_FULL, MemoryPool
from .request import Request
from .router import Router
from .routers import RouterHook, chosen_only, decide
from .sizes import EngineSizes, engine_sizes, matmul_scratch

HUGE_PAGES_FROM = 256 << 20  # bytes of a pool whose last huge page no longer shows in its size
GATHER = 16  # tokens whose embedding is decoded at once: its temporaries stay small


class Layer:
    """One transformer layer: its parts, as the model's switches say."""

    attention: Attention
    router: Router | None = None
    experts: RoutedExperts | None = None
    shared: SharedExpert | None = None
    dense: DenseFeedForward | None = None


class Engine:
    """A container's weights, ready to run, and the memory they run in. Not thread-safe.

    `request` is the sequence that runs unless another is named; up to max_batch_size may be open and take turns.
    `observers` are called as observer(layer, ids, weights, lease) after every routing decision. `routing` is the router
    in the place of the model's own, or None; ids may contain PAD then (routers.py).
    """

    def __init__(self, container: Container, settings: dict, recorder: Recorder | None = None):
        self.container, self.config, self.settings = container, container.config, settings
        self.recorder, self.observers = recorder, []
        self.routing: RouterHook | None = None
        self._load = numpy_kernels.load if settings["backend"] == "numpy" else kernels.load
        self.sizes = engine_sizes(self.config, container.slot_bytes, container.blocks, settings)
        self.pool = _open_pool(self.sizes, settings)
        self.cache = ExpertCache(container, settings, self.pool)
        self.cache.stage = self.stage
        self._rotary = Rotary(self.config.rope, settings["max_seq_len"], self.pool)
        self.pages = KvPages(self.pool, self.config, settings, self._load)
        self.requests = [
            Request(self.pool, self.pages, self.config, self.sizes, settings) for _ in range(settings["max_batch_size"])
        ]
        self.request = self.new_request()
        self._files: dict[str, BinFile] = {}  # what is mapped for good
        self._router_bias = container.router_calibration() if settings["router_calib"] else {}
        self.layers = [self._layer(i) for i in range(self.config.num_layers)]
        self._embed = self._dense("embed").tensors["embed"]
        self._norm = self._dense("final").tensors["norm"].array()
        head = "embed" if self.config.tied_embeddings else "head"
        self._head = self._linear(self._dense(head), head)
        self._rms_norm = self._load("norm").rms_norm
        routers = [layer.router for layer in self.layers if layer.router]
        self._lookahead = routers if settings["prefetch"] == "lookahead" else None

    def forward(self, ids: np.ndarray, phase: str, every: bool = False, request: Request | None = None) -> np.ndarray:
        """ids (tokens,) → logits float32: (1, vocab) of the last token, or (tokens, vocab) when `every` is set.

        The row of the last token is the request's own memory, valid until its next step. A step takes at most
        prefill_chunk tokens in phase "prefill", one in phase "decode".
        """
        request = request or self.request
        self._check_step(len(ids), phase)
        request.arenas.beyond_plan(self.routing is not None)
        try:
            return self._forward(ids, phase, every, request.kv, request.arenas, request.logits)
        except BaseException:
            self.cache.abandon()
            raise
        finally:
            request.arenas.reset()

    def _forward(self, ids: np.ndarray, phase: str, every: bool, kv: KvCache, arenas, logits) -> np.ndarray:
        tokens, arena, scratch = len(ids), arenas.of(phase), arenas.expert_compute
        kv.reserve(tokens)
        self.tokens = ids
        with self.stage("embed"):
            x = arena.take((tokens, self.config.hidden_size), np.float32)
            for i in range(0, tokens, GATHER):
                x[i : i + GATHER] = self._embed.gather(ids[i : i + GATHER])
            self._rotary.upto(kv.length + tokens)
        start = arena.mark()
        for layer in self.layers:
            with self.stage("attention"):
                x += layer.attention(self._normed(x, layer.input_norm, arena), kv, arena)
                arena.rewind(start)
                h = self._normed(x, layer.post_norm, arena)
            if layer.dense:
                with self.stage("expert_compute"):
                    x += layer.dense(h, scratch)
                scratch.reset()
                arena.rewind(start)
                continue
            with self.stage("router"):
                if self.routing is None:
                    experts, weights = layer.router(h, arenas.router)  # (tokens, k) each
                    asked = experts, weights
                else:
                    experts, weights = self._reroute(layer, h, ids, kv.length, arenas.router)
                    asked = chosen_only(experts, weights)
            lease = self.cache.acquire(layer.moe_index, *asked, phase)
            for observer in self.observers:
                observer(layer.index, experts, weights, lease)
            if self._lookahead is not None:
                self._fetch_ahead(layer.moe_index, h, phase, arenas.router)
            with self.stage("expert_compute"):
                layer.experts.bucket(h, experts, lease.experts, scratch)
                layer.experts.run(self.cache.memory, *lease.resident())
            while lease.pending:
                with self.stage("expert_load_wait"):
                    loaded = lease.wait()
                with self.stage("expert_compute"):
                    layer.experts.run(self.cache.memory, *loaded)
            with self.stage("expert_compute"):
                x += layer.experts.combine(weights)
                scratch.reset()
            if layer.shared and getattr(self.routing, "shared", True):
                with self.stage("shared_expert"):
                    x += layer.shared(h, scratch)
                    scratch.reset()
            arenas.router.reset()
            arena.rewind(start)
        kv.advance(tokens)
        with self.stage("head"):
            x = self._normed(x if every else x[-1:], self._norm, arena)
            room = arena.take((matmul_scratch(len(x), self.config.hidden_size),), np.uint8)
            return self._head(x, None if every else logits, room)  # all logits are for the caller to keep

    def _reroute(
        self, layer: Layer, h: np.ndarray, ids: np.ndarray, position: int, arena
    ) -> tuple[np.ndarray, np.ndarray]:
        """The choice of the router that stands in for the model's."""
        logits = layer.router.logits(h, arena) if getattr(self.routing, "needs_logits", True) else None
        return decide(self.routing, layer.router.seen(ids, position), logits)

    @contextlib.contextmanager
    def routed_by(self, router: RouterHook | None):
        """Until the block ends, `router` decides; None is the model's own."""
        before, self.routing = self.routing, router
        try:
            yield
        finally:
            self.routing = before

    def new_request(self) -> Request:
        """A sequence of its own. Raises `MemoryPlanError` when max_batch_size are open."""
        for request in self.requests:
            if not request.open:
                request.open = True
                return request
        raise MemoryPlanError(
            f"{len(self.requests)} requests are open, max_batch_size is {len(self.requests)}: close one, or open the model "
            "with a larger max_batch_size"
        )

    @property
    def kv(self) -> KvCache:
        return self.request.kv

    def memory(self, peak: bool = False) -> dict[str, int]:
        """Bytes by part: what is mapped or allocated now, or with `peak` the most since the engine was made."""
        counts = self.pool.counts()
        pool = counts["peak_by_tag" if peak else "used_by_tag"]
        transient = self.cache.transient_buffers * self.cache.slot_bytes
        mapped = {name: f.header.payload_offset + f.payload.nbytes for name, f in self._files.items()}
        embedding = 0 if self.config.tied_embeddings else mapped["embed"]
        packed = [
            linear
            for layer in self.layers
            if layer.router
            for linear in (layer.router.linear, layer.shared and layer.shared.score)
        ]
        return {
            "dense_bytes": sum(mapped.values()) - embedding,
            "embedding_bytes": embedding,
            "router_bytes": sum(linear.packed_bytes for linear in packed if linear),
            "slots_bytes": pool["slots"] - transient,
            "transient_bytes": transient,
            "kv_cache_bytes": pool["kv"],
            "rotary_bytes": pool["rotary"],
            "scratch_bytes": pool["arena"] + sum(r.arenas.extra_bytes[peak] for r in self.requests),
            "loader_bytes": self.cache.window_bytes,
        }

    def prefault(self) -> None:
        """Touch every mapped weight, so that no step waits for the disk. (The pool does so by itself.)"""
        for file in self._files.values():
            file.payload[::BLOCK].max()

    def _check_step(self, tokens: int, phase: str) -> None:
        most = min(self.settings["prefill_chunk"], self.settings["max_seq_len"]) if phase == "prefill" else 1
        if not 1 <= tokens <= most:
            raise SettingError(
                f"a {phase} step takes 1 to {most} tokens, got {tokens}; open the model with a larger prefill_chunk"
            )

    def _fetch_ahead(self, layer: int, h: np.ndarray, phase: str, arena) -> None:
        """Lookahead: the next layer's router, run early on this layer's input."""
        if layer + 1 < len(self._lookahead):
            ids, _ = self._lookahead[layer + 1](h, arena)
            blocks = dict.fromkeys((ids.reshape(-1) // self.container.block_size).tolist())
            self.cache.prefetch(layer + 1, list(blocks)[: self.cache.prefetcher.budget], phase)

    def stage(self, name: str):
        return self.recorder.stage(name) if self.recorder else contextlib.nullcontext()

    def _normed(self, x: np.ndarray, weight: np.ndarray, arena) -> np.ndarray:
        out = arena.take(x.shape, np.float32)
        self._rms_norm(x, weight, self.config.rms_norm_eps, out, self.settings["threads"])
        return out

    def _dense(self, name: str) -> BinFile:
        if name not in self._files:
            self._files[name] = self.container.dense(name)
        return self._files[name]

    def _linear(self, file: BinFile, name: str, added: np.ndarray | None = None) -> Linear:
        bias = file.tensors.get(f"{name}_bias")
        options = {name: value for name, value in self._ffn_options.items() if name != "exact"}
        return Linear(file.payload, file.tensors[name], options, added if bias is None else bias.array(), self._load)

    @property
    def _ffn_options(self) -> dict:
        s = self.settings
        return dict(
            threads=s["threads"], block_size=s["gemm_block_size"], exact=s["sigmoid"] == "exact",
            int8_activations=s["activations"] == "int8",
        )  # fmt: skip

    def _layer(self, index: int) -> Layer:
        c, file, layer = self.config, self._dense(f"layer_{index}"), Layer()
        tensors = file.tensors
        weights = {name: self._linear(file, name) for name in "qkvo"}
        weights |= {name: tensors[name].array() for name in ("q_norm", "k_norm") if name in tensors}
        layer.index, layer.nbytes = index, file.payload.nbytes
        layer.input_norm, layer.post_norm = tensors["input_norm"].array(), tensors["post_norm"].array()
        layer.attention = Attention(c, index, weights, self._rotary, self.settings["threads"], self._load)
        if c.ffn[index] == "dense":
            layer.dense = self._dense_ffn(file, "")
            return layer
        layer.moe_index = c.moe_layers.index(index)
        router = self.container.router(index)
        bias = router.tensors.get("correction_bias")
        layer.router = Router(
            index, c.router, c.top_k, self._linear(router, "router", self._router_bias.get(index)), None if bias is None else bias.array().copy(),
            self.settings["threads"], self._load,
        )  # fmt: skip
        at_once = self.settings["expert_parallelism"]
        layer.experts = RoutedExperts(self._block_tables(index), c.num_experts, self._ffn_options, at_once, self._load)
        if c.shared != "none":
            score = self._linear(file, "shared_router") if c.shared == "gated" else None
            layer.shared = SharedExpert(self._dense_ffn(file, "shared_"), score)
        return layer

    def _dense_ffn(self, file, prefix: str) -> DenseFeedForward:
        parts = [file.tensors[prefix + name] for name in ("gate", "up", "down")]
        return DenseFeedForward(file.payload, *parts, self._ffn_options, self._load)

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


def _open_pool(sizes: EngineSizes, settings: dict) -> MemoryPool:
    """The pool, as large as the plan says or as pool_size orders. Raises `MemoryPlanError` for one that is too small."""
    given = settings["pool_size"]
    size = sizes.pool_bytes if given is None else parse_size(given, "pool_size")
    least = sizes.pool_bytes - sizes.kv_bytes + sizes.page_bytes
    if size < least:
        raise MemoryPlanError(
            f"pool_size of {size} bytes is too small: slots, arenas and one KV page take {least}; all of max_seq_len "
            f"{settings['max_seq_len']} takes {sizes.pool_bytes}"
        )
    if given is None and settings["pool_power_of_two"]:
        size = 1 << (size - 1).bit_length()
    if settings["huge_pages"] is None:
        settings["huge_pages"] = size >= HUGE_PAGES_FROM
    return MemoryPool(
        size, sizes.slot_bytes, huge_pages=settings["huge_pages"], prefault=settings["prefault"],
        power_of_two=settings["pool_power_of_two"], warn_above=None if given is None else NEARLY_FULL,
    )  # fmt: skip
