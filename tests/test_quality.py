"""The quality report: identical tokens, paired chunks, single matrices, column blocks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.checkpoint import formats
from colibri_lab.checkpoint.convert import convert
from colibri_lab.engine.tokenizer import Tokenizer
from colibri_lab.errors import ModelError, SettingError
from colibri_lab.quality import Text, compare, quality_report, stdlib_texts, windows
from colibri_lab.quality.calibration_texts import write_calibration
from colibri_lab.quality.logits import bootstrap_ratio, frequency_distance
from colibri_lab.quality.texts import file_text, prompt_texts
from colibri_lab.quality.weights import relative_error, zero_shares

ORACLE = Path(__file__).parent / "oracle"
TEXT = "The king went to the river, and said: count the lines, keep the order. " * 12
pytestmark = pytest.mark.filterwarnings("ignore:.*without router calibration")


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    """containers(format, **options) → a container of the tiny glm4_moe checkpoint, made once."""
    made = {}

    def make(format: str, **options) -> Path:
        key = (format, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("quality") / format
            convert(ORACLE / "glm4_moe", made[key], quantize=format, stage="together", progress=False, **options)
        return made[key]

    return make


def report(directory, against, **options):
    return quality_report(directory, against, text=[Text("own", TEXT)], window=32, progress=False, **options)


def test_a_model_against_itself_loses_nothing(containers):
    same = report(containers("bf16"), containers("bf16"))
    s = same.summary()
    assert s["bits_per_byte"] == s["reference_bits_per_byte"] and s["kl"] == 0 and s["router_agreement"] == 1
    assert s["bits_per_byte_change"] == s["bits_per_byte_change_low"] == s["bits_per_byte_change_high"] == 0
    assert s["frequency_distance"] == 0 and s["lost_blocks"] == 0
    assert (same.matrices.weight_error == 0).all() and (same.matrices.output_error.dropna() == 0).all()
    tokenizer = Tokenizer(containers("bf16"))
    firsts = [tokenizer.decode(w.ids[:1]) for w in windows([Text("own", TEXT)], tokenizer, 32)]
    assert s["bytes"] == len(TEXT) - sum(map(len, firsts))


def test_losses_divergence_and_agreement_are_those_of_plain_loops(containers):
    lab, reference = cl.open(containers("int4", tensors="all")), cl.open(containers("bf16"))
    cut = windows([Text("own", TEXT[:150])], lab.tokenizer, 40)
    found = compare(lab, reference, cut, progress=False)
    nll, other, kl, tokens, nbytes, same, choices = 0.0, 0.0, 0.0, 0, 0, {}, {}
    for window in cut:
        p, q = (
            np.exp(logits.astype(float) - logits.max(1, keepdims=True))
            for logits in (reference.logits(window.ids), lab.logits(window.ids))
        )
        p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
        for t in range(len(window.ids) - 1):
            nll -= math.log(q[t, window.ids[t + 1]])
            other -= math.log(p[t, window.ids[t + 1]])
            kl += sum(p[t, v] * math.log(p[t, v] / q[t, v]) for v in range(p.shape[1]))
            tokens, nbytes = tokens + 1, nbytes + int(window.bytes_of[t + 1])
        routes = [model.routes(window.ids).groupby(["layer", "token"]).expert.apply(set) for model in (lab, reference)]
        for (layer, token), mine in routes[0].items():
            same[layer] = same.get(layer, 0) + len(mine & routes[1][layer, token])
            choices[layer] = choices.get(layer, 0) + len(mine)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / nbytes, rel=1e-6)
    assert found.reference_bits_per_byte == pytest.approx(other / math.log(2) / nbytes, rel=1e-6)
    assert found.kl == pytest.approx(kl / tokens, rel=1e-5)
    for row in found.layers.itertuples():
        assert row.router_agreement == pytest.approx(same[row.layer] / choices[row.layer])


def test_worse_formats_lose_more(containers):
    kl = [report(containers(f, tensors="all"), containers("bf16"), weights=False).summary()["kl"]
          for f in ("int8", "int4-g32", "int4-tensor")]  # fmt: skip
    assert kl == sorted(kl) and kl[0] > 0


def test_output_error_is_the_error_on_the_inputs_met(containers):
    """One expert, by hand: its inputs gathered through lab.routes, its output with and without rounding."""
    from colibri_lab.engine.taps import tapped

    box, wanted = cl.open(containers("int4")).container, cl.open(containers("bf16"))
    found = report(containers("int4"), containers("bf16"), tokens=40)
    row = found.matrices[
        (found.matrices.layer == 2) & (found.matrices.expert == 5) & (found.matrices.matrix == "up")
    ].iloc[0]
    (window,) = windows([Text("own", TEXT)], wanted.tokenizer, 32, 40)[:1]
    inputs = {}
    with tapped(wanted.engine, lambda layer, site, x, ids: inputs.setdefault((layer, site), (x.copy(), ids))):
        wanted.logits(window.ids)
    x, ids = inputs[2, "ffn"]
    w, q = wanted.container.expert(2, 5)["up"], box.expert(2, 5)["up"]
    mine, everyone = x[[5 in row for row in ids.tolist()]], x
    moment = (mine.T @ mine + 64 * everyone.T @ everyone / len(x)) / (len(mine) + 64)
    delta = q - w
    expected = math.sqrt(np.trace(delta @ moment @ delta.T) / np.trace(w @ moment @ w.T))
    assert row.output_error == pytest.approx(expected, rel=1e-3)
    assert row.weight_error == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(w), rel=1e-5)
    assert row.format == "int4-g64" and 0 < row.weight_error < 0.2


def test_a_column_block_lost_to_row_scales_is_flagged_and_groups_keep_it(tmp_path, containers):
    """Every expert's left 64 columns thirty times smaller than the others."""
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, (32, 128)).astype(np.float32)
    w[:, :64] /= 30
    back = {name: formats.decode(formats.encode(w, name), name) for name in ("int4-row", "int4-g64")}
    assert zero_shares(w, back["int4-row"])[0] > 0.95 and zero_shares(w, back["int4-row"])[1] < 0.2
    assert (zero_shares(w, back["int4-g64"]) < 0.2).all()
    assert relative_error(w[:, :64], back["int4-row"][:, :64]) > 0.95


def test_a_lost_block_is_named_by_the_report(tmp_path):
    import struct

    source = shutil.copytree(ORACLE / "qwen3_moe", tmp_path / "source", ignore=shutil.ignore_patterns("published"))
    path = source / "model.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    item = json.loads(raw[8:start])["model.layers.1.mlp.experts.2.down_proj.weight"]
    begin, end = (start + n for n in item["data_offsets"])
    values = formats.bf16_to_f32(np.frombuffer(raw[begin:end], "<u2").reshape(item["shape"])).copy()
    assert item["dtype"] == "BF16" and values.shape[1] <= 64
    values[:] = np.clip(values, -0.001, 0.001)
    values[:, -1] = 1
    raw[begin:end] = formats.f32_to_bf16(values).tobytes()
    path.write_bytes(raw)
    for format in ("bf16", "int4-row", "int4-g32"):
        convert(source, tmp_path / format, quantize=format, stage="together", progress=False)
    lost = {f: report(tmp_path / f, tmp_path / "bf16").blocks for f in ("int4-row", "int4-g32")}
    found = lost["int4-row"][lost["int4-row"].lost]
    assert [(row.layer, row.expert, row.matrix, row.first_column) for row in found.itertuples()] == [(1, 2, "down", 0)]
    assert not lost["int4-g32"].lost.any() or values.shape[1] <= 32


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=5))
def test_bytes_of_tokens_add_up_to_the_text(texts):
    tokenizer = Tokenizer(ORACLE.parent.parent / "data/colibri-tiny")
    for text in texts:
        ids, sizes = tokenizer.encode_bytes(text)
        assert sizes.sum() == len(text.encode("utf-8", "surrogatepass")) or not len(ids)
        assert (sizes >= 0).all() and len(ids) == len(sizes)
        assert ids.tolist() == tokenizer.encode(text)


def test_windows_are_consecutive_and_evenly_spread():
    tokenizer = Tokenizer(ORACLE.parent.parent / "data/colibri-tiny")
    texts = [Text(str(i), f"line number {i} of a text that goes on " * 40) for i in range(8)]
    every = windows(texts, tokenizer, 50)
    for text in texts:
        ids = [i for w in every if w.text == text.name for i in w.ids]
        whole = tokenizer.encode(text.text)
        assert ids == whole[: len(ids)] and len(whole) - len(ids) <= 1
    some = windows(texts, tokenizer, 50, tokens=800)
    assert len({w.text for w in some}) == 8 and 700 <= sum(len(w.ids) for w in some) <= 900


def test_halves_of_the_standard_library_share_nothing_and_leave_tests_out():
    held, other = ({t.name for t in stdlib_texts(half)} for half in ("held-out", "calibration"))
    assert len(held) > 50 and len(other) > 50 and not held & other
    assert {"argparse.py", "tarfile.py", "asyncio/events.py"} <= held | other
    assert not any(name.startswith(("test/", "idlelib/", "site-packages/")) for name in held | other)
    assert [t.name for t in stdlib_texts()] == [t.name for t in stdlib_texts()]
    with pytest.raises(SettingError, match="half must be one of held-out, calibration"):
        stdlib_texts("all")


def test_prompts_are_read_by_domain(project):
    texts = prompt_texts(project / "data/prompts.json")
    assert {t.name.split(":")[0] for t in texts} == {"code", "verse", "dictionary", "english", "german", "chinese"}


def test_bootstrap_interval_of_a_known_case():
    """Every chunk 1 % worse: no spread. Independent noise of 10 %: about 1.96 * 0.1 / sqrt(n) on either side."""
    rng = np.random.default_rng(1)
    reference = rng.uniform(90, 110, 400)
    low, high = bootstrap_ratio(1.01 * reference, reference)
    assert low == pytest.approx(0.01) and high == pytest.approx(0.01)
    low, high = bootstrap_ratio(reference * (1 + 0.1 * rng.normal(size=400)), reference)
    assert low < 0.01 and high > -0.01 and high - low == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.2)


def test_small_functions():
    assert frequency_distance(np.array([1, 0, 0]), np.array([0, 5, 0])) == 1
    assert frequency_distance(np.array([2, 2]), np.array([3, 1])) == 0.25
    assert relative_error(np.zeros((2, 2)), np.zeros((2, 2))) is None


def test_json_of_the_command_line(containers, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    args = [str(containers("int4")), "--against", str(containers("bf16")), "--text", str(path), "--window", "40"]
    assert cli.main(["quality", *args, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    for key in (
        "bits_per_byte",
        "reference_bits_per_byte",
        "kl",
        "router_agreement",
        "perplexity",
        "reference_perplexity",
    ):
        assert data[key] > 0
    assert data["bits_per_byte_change_low"] <= data["bits_per_byte_change"] <= data["bits_per_byte_change_high"]
    assert data["bits_per_byte_change"] == pytest.approx(data["bits_per_byte"] / data["reference_bits_per_byte"] - 1)
    assert data["container_bytes"] < data["reference_container_bytes"]
    expert = [row for row in data["matrices"] if row["expert"] == 3 and row["layer"] == 1]
    assert [row["matrix"] for row in expert] == ["gate", "up", "down"] and expert[0]["format"] == "int4-g64"
    assert [row["expert"] for row in data["matrices"] if row["matrix"] == "embed"] == [None]
    assert len(data["layers"]) == 2 and data["texts"][0]["text"] == "text.txt" and data["lost"] == []
    assert cli.main(["quality", *args]) == 0
    assert "router agreement" in capsys.readouterr().out


def test_stdlib_as_a_source(containers):
    r = quality_report(
        containers("int8"), containers("bf16"), source="stdlib", tokens=512, window=64, weights=False, progress=False
    )
    assert r.matrices.empty and len(r.texts) >= 4 and r.summary()["kl"] > 0


def test_other_models_and_texts_that_cannot_be_used_are_refused(containers, tmp_path):
    other = tmp_path / "other"
    convert(ORACLE / "mixtral", other, progress=False)
    with pytest.raises(ModelError, match="are different models"):
        report(other, containers("bf16"))
    with pytest.raises(SettingError, match="give either text or source"):
        quality_report(other, other, progress=False)
    with pytest.raises(SettingError, match="source cannot be 'stdlip'; did you mean 'stdlib'"):
        quality_report(other, other, source="stdlip", progress=False)
    with pytest.raises(SettingError, match="window and tokens must be at least 2, got 1 and 100"):
        quality_report(other, other, source="stdlib", window=1, tokens=100, progress=False)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match="latin.txt: expected text in UTF-8"):
        file_text(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ModelError, match="empty.txt: expected text, found an empty file"):
        file_text(tmp_path / "empty.txt")
    with pytest.raises(ModelError, match="fewer than two tokens"):
        windows([Text("one", "a")], Tokenizer(ORACLE / "glm4_moe"))


def test_calibration_texts_of_the_library_and_of_the_model_itself(containers, tmp_path, capsys):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"a": [{"name": "one", "text": "The king"}], "b": [{"name": "two", "text": "def "}]}))
    path = tmp_path / "calib.json"
    model = ["--model", str(containers("bf16")), "--prompts", str(prompts), "--own", "3"]
    assert cli.main(["calibration-data", "--output", str(path), "--texts", "20", *model]) == 0
    assert f"{path}: 20 texts" in capsys.readouterr().out
    texts = [entry["text"] for entry in json.loads(path.read_text())]
    assert [t.startswith(p) for t, p in zip(texts, ("The king", "def ", "The king"))] == [True] * 3
    assert texts[0] != texts[2] and len(texts[0]) > 20
    held = "".join(t.text for t in stdlib_texts())
    assert not any(text in held for text in texts[3:] if len(text) > 300)
    write_calibration(
        tmp_path / "again.json", 20, lab=cl.open(containers("bf16")), prompts=prompt_texts(prompts), own=3
    )
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    with pytest.raises(SettingError, match="continuations need both a model and prompts"):
        write_calibration(path, prompts=prompt_texts(prompts))
    prompts.write_text('{"a": ["text"]}')
    with pytest.raises(ModelError, match="prompts.json: a: expected a list of objects with a name and a text"):
        prompt_texts(prompts)
