"""Binary and array importers, with files made here byte by byte (torch's own is checked once against a stored dump)."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile

import numpy as np
import pytest

from colibri_lab.config import ModelConfig, RouterConfig
from colibri_lab.errors import TraceError
from colibri_lab.trace import load_trace
from colibri_lab.trace.formats.torch_file import load_torch
from colibri_lab.trace.table import PAD


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.bin"


def ints(*values) -> bytes:
    return np.array(values, "<i4").tobytes()


MBOLT = ints(0x544C424D, 1, 8) + b"".join(
    ints(*record)
    for record in [
        (0, 2, 3, 1, 2, 3, 4, 5, 6),  # a prompt of three tokens
        (2, 2, 1, 7, 0),  # of which the last layer runs one
        (0, 2, 1, 4, 1),
        (2, 2, 1, 3, 7),
    ]
)


def test_mbolt(path):
    path.write_bytes(MBOLT)
    trace = load_trace(path)
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.layers == [0, 2]
    assert trace.experts[1].tolist() == [3, 4]
    assert "layer 2 lists fewer prompt tokens" in trace.header["notes"][0]


def test_mbolt_cut_off_at_the_end_keeps_whole_records(path):
    path.write_bytes(MBOLT[:-4])
    trace = load_trace(path)
    assert len(trace) == 5
    assert not trace.header["complete"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (MBOLT[:12], "byte 12: expected at least one whole record"),
        (ints(0x544C424D, 2, 8), "byte 4: expected format version 1"),
        (MBOLT[:12] + ints(0, 0, 1), "byte 12: expected layer, k up to 8"),
        (MBOLT[:12] + ints(0, 2, 1, 1, 8), "byte 24: expected expert ids from 0 to 7, found 8"),
    ],
)
def test_mbolt_refuses(path, data, match):
    path.write_bytes(data)
    with pytest.raises(TraceError, match=match):
        load_trace(path)


def test_iku1(path):
    path.write_bytes(struct.pack("<3I", 0x31554B49, 3, 2) + np.array([0, 0, 4, 1, 0, 9], "<u4").tobytes())
    trace = load_trace(path)
    assert trace.layers == [1, 2]
    assert trace.counts.tolist() == [[4, 1], [0, 9]]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TraceError, match="byte 12: expected 3 x 2 counts, found 5 counts"):
        load_trace(path)


def gguf(kind: str, tensors: dict[str, np.ndarray], version: int = 3) -> bytes:
    """A minimal GGUF as llama-imatrix writes it: strings, a string array, an integer; float32 tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 3)
    out += text("general.type") + struct.pack("<I", 8) + text(kind)
    out += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("calibration.txt")
    out += text("imatrix.chunk_count") + struct.pack("<II", 4, 7)
    at, data = 0, b""
    for name, values in tensors.items():
        out += text(name) + struct.pack("<I2QIQ", 2, 1, len(values), 0, at)
        raw = values.astype("<f4").tobytes()
        data += raw + bytes(-len(raw) % 32)
        at = len(data)
    return out + bytes(-len(out) % 32) + data


COUNTS = {
    "blk.1.ffn_gate_exps.weight.counts": np.array([3, 0, 5]),
    "blk.1.ffn_up_exps.weight.counts": np.array([3, 0, 5]),
    "blk.2.ffn_down_exps.weight.counts": np.array([0, 1, 7]),
    "blk.2.ffn_down_exps.weight.in_sum2": np.ones(4),
    "blk.0.attn_q.weight.counts": np.array([8]),
}


def test_imatrix_counts(path):
    path.write_bytes(gguf("imatrix", COUNTS))
    trace = load_trace(path)
    assert trace.layers == [1, 2]
    assert trace.counts.tolist() == [[3, 0, 5], [0, 1, 7]]
    assert trace.header["notes"][0].startswith("imatrix of 7 chunks")
    assert len(trace.header["notes"]) == 1


def test_imatrix_notes_projections_that_disagree(path):
    path.write_bytes(gguf("imatrix", COUNTS | {"blk.1.ffn_up_exps.weight.counts": np.array([3, 1, 5])}))
    assert "layer 1: gate, up and down counts differ" in load_trace(path).header["notes"][1]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (gguf("model", COUNTS), "this GGUF is not an importance matrix"),
        (gguf("imatrix", {"blk.0.attn_q.weight.counts": np.array([8])}), "the model may be dense"),
        (gguf("imatrix", COUNTS, version=1), "byte 4: expected GGUF version 2 or 3, found 1"),
        (gguf("imatrix", COUNTS)[:100], "found the end of the file"),
        (gguf("imatrix", COUNTS)[:-128], "float32 inside the file"),
    ],
)
def test_imatrix_refuses(path, data, match):
    path.write_bytes(data)
    with pytest.raises(TraceError, match=match):
        load_trace(path)


# torch.save of torch 2.13: {"a": int32 [[1, 2], [3, 4]] transposed, "b": bfloat16 [1.5], "c": [1, "x"]}
TORCH_DUMP = (
    "UEsDBBQAAAAAAO8Ufl0POsPtDAEAAAwBAAAQAAAAYXJjaGl2ZS9kYXRhLnBrbIACfXEAKFgBAAAAYXEBY3RvcmNoLl91dGlscwpfcmVidWlsZF"
    "90ZW5zb3JfdjIKcQIoKFgHAAAAc3RvcmFnZXEDY3RvcmNoCkludFN0b3JhZ2UKcQRYAQAAADBxBVgDAAAAY3B1cQZLBHRxB1FLAEsCSwKGcQhL"
    "AUsChnEJiWNjb2xsZWN0aW9ucwpPcmRlcmVkRGljdApxCilScQt0cQxScQ1YAQAAAGJxDmgCKChoA2N0b3JjaApCRmxvYXQxNlN0b3JhZ2UKcQ"
    "9YAQAAADFxEGgGSwF0cRFRSwBLAYVxEksBhXETiWgKKVJxFHRxFVJxFlgBAAAAY3EXXXEYKEsBWAEAAAB4cRlldS5QSwMEFAAAAAAA7xR+XYU9"
    "4xkGAAAABgAAABEAAABhcmNoaXZlL2J5dGVvcmRlcmxpdHRsZVBLAwQUAAAAAADvFH5d79QFrxAAAAAQAAAADgAAAGFyY2hpdmUvZGF0YS8wAQ"
    "AAAAIAAAADAAAABAAAAFBLAwQUAAAAAADvFH5djOhFPAIAAAACAAAADgAAAGFyY2hpdmUvZGF0YS8xwD9QSwECFAMUAAAAAADvFH5dDzrD7QwB"
    "AAAMAQAAEAAAAAAAAAAAAAAAgAEAAAAAYXJjaGl2ZS9kYXRhLnBrbFBLAQIUAxQAAAAAAO8Ufl2FPeMZBgAAAAYAAAARAAAAAAAAAAAAAACAAT"
    "oBAABhcmNoaXZlL2J5dGVvcmRlclBLAQIUAxQAAAAAAO8Ufl3v1AWvEAAAABAAAAAOAAAAAAAAAAAAAACAAW8BAABhcmNoaXZlL2RhdGEvMFBL"
    "AQIUAxQAAAAAAO8Ufl2M6EU8AgAAAAIAAAAOAAAAAAAAAAAAAACAAasBAABhcmNoaXZlL2RhdGEvMVBLBQYAAAAABAAEAPUAAADZAQAAAAA="
)


def test_torch_own_file_is_read_without_torch(path):
    path.write_bytes(base64.b64decode(TORCH_DUMP))
    data = load_torch(path)
    assert data["a"].tolist() == [[1, 3], [2, 4]]
    assert data["b"].tolist() == [0x3FC0], "bfloat16 stays raw"
    assert data["c"] == [1, "x"]


class FakeTensor:
    """Pickles as torch.save writes tensors; the arrays end up beside the pickle."""

    def __init__(self, array):
        self.array = np.asarray(array)


def torch_save(path, value, root="archive/"):
    """The zip layout of torch.save, made with the standard library."""
    storages = []
    names = {"int32": "IntStorage", "int64": "LongStorage", "float32": "FloatStorage"}

    class Name:
        def __init__(self, module, name):
            self.module, self.name = module, name

        def __reduce__(self):
            return f"{self.name}"

    class Pickler(pickle._Pickler):
        dispatch = dict(pickle._Pickler.dispatch)

        def save(self, obj, save_persistent_id=True):
            if isinstance(obj, Name):
                return self.write(f"c{obj.module}\n{obj.name}\n".encode())
            if isinstance(obj, FakeTensor):
                array = np.ascontiguousarray(obj.array)
                self.save(Name("torch._utils", "_rebuild_tensor_v2"))
                self.write(pickle.MARK)
                key = str(len(storages))
                storages.append(array.tobytes())
                self.save(("storage", Name("torch", names[str(array.dtype)]), key, "cpu", array.size))
                self.write(pickle.BINPERSID)
                strides = tuple(s // array.itemsize for s in array.strides)
                for part in (0, array.shape, strides, False, {}):
                    self.save(part)
                return self.write(pickle.TUPLE + pickle.REDUCE)
            return super().save(obj, save_persistent_id)

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(root + "data.pkl", buffer.getvalue())
        for key, raw in enumerate(storages):
            archive.writestr(f"{root}data/{key}", raw)


def per_token(**changes):
    """Two passes of a model with a dense layer 0: a prompt of three tokens, then one. Physical 4 and 5 are copies."""
    ids = np.full((2, 3, 4), -1)
    ids[1, :, :2] = [[4, 1], [2, 3], [5, 0]]
    more = np.full((2, 1, 4), -1)
    more[1, 0, :2] = [3, 5]
    first = {
        "forward_pass_id": 1,
        "input_ids": [7, 8, 9],
        "forward_mode": 1,
        "topk_ids_of_layer": FakeTensor(ids.astype(np.int32)),
    }
    second = {
        "forward_pass_id": 2,
        "input_ids": [4],
        "forward_mode": 2,
        "topk_ids_of_layer": FakeTensor(more.astype(np.int32)),
    }
    table = FakeTensor(np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 2]]))
    return {"records": [first, second], "last_physical_to_logical_map": table, **changes}


def test_sglang_per_token_ids_become_logical(path):
    torch_save(path, per_token())
    trace = load_trace(path)
    assert trace.layers == [1], "layer 0 routed nothing: it is dense"
    assert trace.experts.tolist() == [[0, 1], [2, 3], [2, 0], [3, 2]]
    assert trace.phase.tolist() == [0, 0, 0, 1]
    assert trace.token_id.tolist() == [7, 8, 9, 4]
    assert trace.num_experts == 4


def test_sglang_without_a_map_needs_to_be_told(path):
    torch_save(path, {"records": per_token()["records"]})
    with pytest.raises(TraceError, match="expected last_physical_to_logical_map"):
        load_trace(path)
    assert load_trace(path, physical_is_logical=True).experts[0].tolist() == [4, 1]


def test_sglang_stat_is_a_union_per_pass(path):
    counts = np.zeros((3, 2, 4), np.int32)
    counts[0, 1] = [5, 0, 1, 0]
    counts[2, 1] = [0, 2, 0, 0]
    torch_save(path, {"rank": 0, "logical_count": FakeTensor(counts)})
    trace = load_trace(path)
    assert trace.report()["granularity"] == "union per batch"
    assert trace.experts.tolist() == [[0, 2], [1, PAD]]
    assert trace.step.tolist() == [0, 2]
    with pytest.raises(TraceError, match="needs tokens, which this trace .* lacks: rows are unions"):
        trace.require("tokens")
    assert load_trace(path, counts_only=True).counts.tolist() == [[5, 2, 1, 0]]


def test_sglang_per_pass_counts_are_mapped_to_logical(path):
    record = {"forward_pass_id": 1, "global_physical_count": FakeTensor(np.array([[1, 2, 4]], np.int32))}
    torch_save(path, {"records": [record], "last_physical_to_logical_map": FakeTensor(np.array([[0, 1, 0]]))})
    assert load_trace(path, counts_only=True).counts.tolist() == [[5, 2]]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"records": [], "last_physical_to_logical_map": None}, "records: expected at least one forward pass"),
        ({"weights": 1}, r"expected records or logical_count, found \['weights'\]"),
        ([1], "top level: expected a dict, found list"),
        ({"logical_count": FakeTensor(np.zeros((2, 2, 2), np.int32))}, "expected at least one count above 0"),
        (
            per_token(records=[{**per_token()["records"][0], "input_ids": [1]}]),
            "record 0: expected 3 input_ids, found 1",
        ),
    ],
)
def test_sglang_refuses(path, value, match):
    torch_save(path, value)
    with pytest.raises(TraceError, match=match):
        load_trace(path)


def test_a_torch_file_that_wants_to_run_code_is_refused_before_it_does(path, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"records": Hostile()}))
    with pytest.raises(TraceError, match=r"asks for .*open, which is not a tensor"):
        load_trace(path)
    assert not (tmp_path / "ran").exists()


def test_damaged_torch_files_are_refused(path):
    torch_save(path, per_token())
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(TraceError, match="trace.bin: damaged zip archive"):
        load_trace(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    with pytest.raises(TraceError, match="data.pkl is compressed"):
        load_trace(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1})[:-4])
    with pytest.raises(TraceError, match="cannot read the pickle|damaged torch.save"):
        load_trace(path)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8])
def test_routed_experts_array(path, dtype):
    ids = np.zeros((4, 3, 2), dtype)  # layer 0 is a dense placeholder
    ids[:, 1] = [[3, 1], [2, 0], [1, 3], [0, 1]]
    ids[:, 2] = [[5, 1], [2, 4], [1, 0], [0, 5]]
    with open(path, "wb") as file:
        np.save(file, ids)
    trace = load_trace(path, num_prompt_tokens=2, ranked=True)
    assert trace.layers == [1, 2]
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert trace.layer.tolist() == [1, 1, 2, 2, 1, 2, 1, 2]
    assert trace.experts[:2].tolist() == [[3, 1], [2, 0]]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert load_trace(path, moe_layers=[4, 9]).layers == [4, 9]
    assert "every token is taken as decode" in load_trace(path).header["notes"][0]


def test_routed_experts_npz_with_prompt_and_tokens(path):
    prompt, answer = np.arange(12).reshape(3, 2, 2) % 5 + [[[0], [5]]], np.array([[[1, 2], [3, 4]]])
    with open(path, "wb") as file:
        np.savez(file, prompt_routed_experts=prompt, routed_experts=answer, token_ids=[5, 6, 7, 8])
    trace = load_trace(path, num_experts=16)
    assert trace.report()["rows_by_phase"] == {"prefill": 6, "decode": 2}
    assert trace.token_id.tolist() == [5, 6, 7, 5, 6, 7, 8, 8]
    with pytest.raises(TraceError, match="expected num_prompt_tokens 9 rows, found 3"):
        load_trace(path, num_prompt_tokens=9)
    with pytest.raises(TraceError, match="expected below num_experts 3"):
        load_trace(path, num_experts=3)


def config(kind="softmax", **router) -> ModelConfig:
    return ModelConfig(
        family="test", vocab_size=8, hidden_size=4, num_layers=3, num_heads=1, num_kv_heads=1, head_dim=4,
        num_experts=6, top_k=2, expert_intermediate_size=4, ffn=("dense", "moe", "moe"), windows=(None,) * 3,
        router=RouterConfig(kind=kind, **router),
    )  # fmt: skip


def test_router_logits_go_through_the_familys_own_router(path):
    """With a correction bias, the largest logits are not the experts that run."""
    logits = np.zeros((2, 3, 6), np.float32)
    logits[:, :, 0], logits[:, :, 1], logits[:, :, 2] = 3, 2, 1
    bias = np.zeros((2, 6), np.float32)
    bias[1, 5] = 10
    with open(path, "wb") as file:
        np.savez(file, router_logits=logits, correction_bias=bias, attention_mask=[0, 1, 1], input_ids=[0, 4, 5])
    trace = load_trace(path, config=config("sigmoid_group", correction_bias=True, renormalise=True))
    assert trace.layers == [1, 2]
    assert trace.experts.tolist() == [[0, 1], [0, 1], [5, 0], [5, 0]]
    sigmoid = 1 / (1 + np.exp(-np.array([0.0, 3.0])))
    assert trace.weights[2] == pytest.approx(sigmoid / sigmoid.sum(), rel=1e-6)
    assert trace.token_id.tolist() == [4, 5, 4, 5]
    assert "1 padding tokens were left out" in trace.header["notes"]


def test_router_logits_per_layer_and_refusals(path):
    with open(path, "wb") as file:
        np.savez(file, layer_2=np.eye(6, dtype=np.float32)[:3], layer_10=np.eye(6, dtype=np.float32)[:3])
    trace = load_trace(path, config=config().to_json() | {"ffn": ("dense", "moe", "moe")}, num_prompt_tokens=1)
    assert trace.layers == [2, 10]
    assert trace.experts[0].tolist() == [0, 1], "equal scores: the lower id wins"
    with pytest.raises(TraceError, match="config: expected config="):
        load_trace(path)
    with pytest.raises(TraceError, match="correction_bias: expected"):
        load_trace(path, config=config("sigmoid_group", correction_bias=True))
    with open(path, "wb") as file:
        np.savez(file, router_logits=np.full((2, 1, 6), np.nan))
    with pytest.raises(TraceError, match="logit of token 0, expert 0 is nan"):
        load_trace(path, config=config())
    with open(path, "wb") as file:
        np.savez(file, router_logits=np.zeros((2, 1, 5)))
    with pytest.raises(TraceError, match=r"expected \(2, tokens, 6\) as the config says, found \(2, 1, 5\)"):
        load_trace(path, config=config())


def test_load_matrix_as_npy_and_json(path):
    counts = np.array([[0, 0, 0], [4, 0, 1]])
    with open(path, "wb") as file:
        np.save(file, counts)
    assert load_trace(path).layers == [1]
    path.write_text(json.dumps({"logical_count": [counts.tolist(), counts.tolist()]}))
    assert load_trace(path).counts.tolist() == [[8, 0, 2]]
    path.write_text(json.dumps(counts.tolist()))
    assert load_trace(path, moe_layers=[3, 5]).layers == [5]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[1, 2], [3]]", "expected rows of equal length"),
        ("[[1.5, 2]]", "expected whole counts, found fractions"),
        ("[1, 2]", r"expected numbers \(layers, experts\)"),
        ("[[0, 0]]", "expected at least one count above 0"),
        ("[[1, 2]", "not readable JSON"),
    ],
)
def test_load_matrix_refuses(path, text, match):
    path.write_text(text)
    with pytest.raises(TraceError, match=match):
        load_trace(path)


def test_pickled_numpy_files_are_not_read(path):
    with open(path, "wb") as file:
        np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(TraceError, match="not a trace of any known format"):
        load_trace(path)
