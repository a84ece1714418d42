"""Recording: from an engine's calls, and from a model's router hooks (a stand-in for torch, duck-typed)."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.config import ModelConfig, RouterConfig
from colibri_lab.errors import TraceError
from colibri_lab.trace import Trace, TraceRecorder, record_transformers


def recorder() -> TraceRecorder:
    return TraceRecorder(num_experts=8, top_k=2, moe_layers=[1, 2], engine="test")


def test_recorded_rows_come_back_in_order():
    rec = recorder()
    buffer = np.array([[3, 1], [0, 2]])
    rec.add(0, 1, "prefill", 0, [5, 6], buffer, weights=[[0.6, 0.4], [0.7, 0.3]], resident=[[1, 0], [0, 0]])
    buffer[:] = 7  # the engine reuses its buffers
    rec.add(0, 2, 0, 0, [5, 6], [[1, 4], [4, 5]], weights=np.ones((2, 2)), resident=np.zeros((2, 2)))
    rec.add(1, 1, "decode", 0, [9], [[2, 3]], weights=[[0.5, 0.5]], resident=[[1, 1]])
    trace = rec.trace
    assert trace.experts.tolist() == [[3, 1], [0, 2], [1, 4], [4, 5], [2, 3]]
    assert trace.event.tolist() == [0, 0, 1, 1, 2]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1]
    assert trace.token_id.tolist() == [5, 6, 5, 6, 9]
    assert trace.resident[0].tolist() == [1, 0]
    assert trace.report()["id_order"] == "ranked"
    assert len(rec) == 3


def test_a_trace_can_be_taken_while_recording_goes_on(tmp_path):
    rec = recorder()
    rec.add(0, 1, "decode", 0, [1], [[1, 2]])
    first = rec.trace
    rec.add(1, 1, "decode", 0, [1], [[3, 4]])
    assert (len(first), len(rec.trace)) == (1, 2)
    assert len(Trace.load(rec.save(tmp_path / "t.parquet"))) == 2
    rec.clear()
    with pytest.raises(TraceError, match="nothing was recorded: no MoE layer ran"):
        _ = rec.trace


def test_columns_that_some_steps_lack_are_left_out_and_noted():
    rec = recorder()
    rec.add(0, 1, "decode", 0, [1], [[1, 2]], weights=[[0.5, 0.5]])
    rec.add(1, 1, "decode", 0, [1], [[1, 2]])
    trace = rec.trace
    assert trace.weights is None
    assert trace.header["notes"] == ["weights was recorded in 1 of 2 events and was left out"]


def test_mistakes_are_refused_when_they_are_made():
    with pytest.raises(TraceError, match="unknown trace header field 'experts'"):
        TraceRecorder(experts=8)
    with pytest.raises(TraceError, match=r"weights must have the shape of experts \(1, 2\), got \(1, 3\)"):
        recorder().add(0, 1, "decode", 0, [1], [[1, 2]], weights=[[1, 2, 3]])
    with pytest.raises(TraceError, match="1 rows of experts but 2 token ids"):
        recorder().add(0, 1, "decode", 0, [1, 2], [[1, 2]])


class Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook

    def remove(self):
        self.hooks.remove(self.hook)


class FakeRouter:
    """Router of a layer: prefers expert (token id + layer) mod 4, then the next one up."""

    def __init__(self, layer, returns="tuple"):
        self.layer, self.returns, self.hooks = layer, returns, []

    def register_forward_hook(self, hook):
        self.hooks.append(hook)
        return Handle(self.hooks, hook)

    def __call__(self, ids):
        ids = ids.reshape(-1)
        logits = np.full((len(ids), 4), -5.0, np.float32)
        logits[np.arange(len(ids)), (ids + self.layer) % 4] = 1.0
        logits[np.arange(len(ids)), (ids + self.layer + 1) % 4] = 0.5
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, :2]
        weights = np.full(chosen.shape, 0.5)
        weights[:, 0] = 0.6
        output = {"tuple": (logits, weights, chosen), "logits": logits, "nothing": None}[self.returns]
        for hook in list(self.hooks):
            hook(self, (), output)


class FakeModel:
    class config:
        name_or_path, num_experts = "fake/moe", 4

    def __init__(self, returns="tuple"):
        self.routers = {f"model.layers.{layer}.mlp.gate": FakeRouter(layer, returns) for layer in (1, 3)}
        self.hooks = []

    def named_modules(self):
        return [("", self), *self.routers.items()]

    def register_forward_pre_hook(self, hook, with_kwargs):
        assert with_kwargs
        self.hooks.append(hook)
        return Handle(self.hooks, hook)

    def __call__(self, **kwargs):
        for hook in list(self.hooks):
            hook(self, (), kwargs)
        for router in self.routers.values():
            router(np.asarray(kwargs["input_ids"]))


def test_hooks_record_prefill_and_decode():
    model = FakeModel()
    with record_transformers(model) as rec:
        model(input_ids=np.array([[5, 6, 7]]))
        model(input_ids=np.array([[8]]), past_key_values="a cache")
    trace = rec.trace
    assert trace.layers == [1, 3]
    assert trace.step.tolist() == [0] * 6 + [1] * 2
    assert trace.phase.tolist() == [0] * 6 + [1] * 2
    assert trace.experts[0].tolist() == [2, 3]
    assert trace.token_id.tolist() == [5, 6, 7, 5, 6, 7, 8, 8]
    assert trace.weights[0] == pytest.approx([0.6, 0.5])
    assert (trace.header["model"], trace.num_experts, trace.header["ranked"]) == ("fake/moe", 4, True)
    assert not model.hooks and not any(router.hooks for router in model.routers.values())


def test_padding_is_left_out_and_texts_are_told_apart():
    model = FakeModel()
    with record_transformers(model) as rec:
        model(input_ids=np.array([[0, 7], [5, 6]]), attention_mask=np.array([[0, 1], [1, 1]]))
        model(input_ids=np.array([[1], [2]]), attention_mask=np.array([[0, 1, 1], [1, 1, 1]]))
    layer = rec.trace.select(layers=[1])
    assert layer.sequence.tolist() == [0, 1, 1, 0, 1]
    assert layer.token_id.tolist() == [7, 5, 6, 1, 2]
    assert layer.phase.tolist() == [0, 0, 0, 1, 1]


def test_a_pass_without_a_past_starts_new_texts():
    model = FakeModel()
    with record_transformers(model) as rec:
        model(input_ids=np.array([[5, 6], [7, 8]]))
        model(input_ids=np.array([[1], [2]]), attention_mask=np.ones((2, 3)))
        model(input_ids=np.array([[3, 4]]))
    assert rec.trace.select(layers=[1]).sequence.tolist() == [0, 0, 1, 1, 0, 1, 2, 2]


def test_hooks_are_removed_when_the_run_fails():
    model = FakeModel()
    with pytest.raises(RuntimeError, match="boom"), record_transformers(model):
        raise RuntimeError("boom")
    assert not model.hooks


def config(**router):
    return ModelConfig(
        family="t", vocab_size=8, hidden_size=4, num_layers=4, num_heads=1, num_kv_heads=1, head_dim=4, num_experts=4,
        top_k=2, expert_intermediate_size=4, ffn=("dense", "moe", "dense", "moe"), windows=(None,) * 4,
        router=RouterConfig(**router),
    )  # fmt: skip


def test_routers_that_return_logits_need_the_config():
    model = FakeModel("logits")
    with record_transformers(model, config=config(renormalise=True)) as rec:
        model(input_ids=np.array([[5]]))
    assert rec.trace.experts.tolist() == [[2, 3], [0, 1]]
    assert rec.trace.weights[0].sum() == pytest.approx(1)
    with pytest.raises(TraceError, match=r"the router returned ndarray \(1, 4\); expected \(logits, weights, ids\)"):
        model = FakeModel("logits")
        with record_transformers(model):
            model(input_ids=np.array([[5]]))
    with pytest.raises(TraceError, match="chooses by a correction bias"):
        model = FakeModel("logits")
        with record_transformers(model, config=config(correction_bias=True)):
            model(input_ids=np.array([[5]]))


def test_models_without_routers_and_parts_called_alone_are_refused():
    model = FakeModel()
    with pytest.raises(TraceError, match="a part of the model was called on its own"), record_transformers(model):
        model.routers["model.layers.1.mlp.gate"](np.array([1]))
    model.routers = {}
    with pytest.raises(TraceError, match="FakeModel has no router that can be recorded"), record_transformers(model):
        pass
