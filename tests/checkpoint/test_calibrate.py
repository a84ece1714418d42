"""Calibration: its texts, the moments that the model's inputs have, and what rounding by them is worth on other texts."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as cl
from colibri_lab.checkpoint import calibrate, router_calib
from colibri_lab.checkpoint.calibrate import read_calibration
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.convert import quantize
from colibri_lab.checkpoint.moments import PRIOR, Moments
from colibri_lab.checkpoint.validate import validate
from colibri_lab.checkpoint.verify import verify_container
from colibri_lab.engine.taps import tapped
from colibri_lab.errors import ContainerError, ModelError, SettingError
from colibri_lab.front import container_of
from colibri_lab.quality import compare, stdlib_texts, windows

FEW = "ignore:.*1024 or more are advised"
UNCALIBRATED = "ignore:.*without router calibration"
pytestmark = [pytest.mark.filterwarnings(FEW), pytest.mark.filterwarnings(UNCALIBRATED)]


def write(path: Path, entries) -> Path:
    path.write_text(json.dumps(entries))
    return path


def test_fewer_than_1024_texts_are_warned_about(tmp_path):
    enough = write(tmp_path / "enough.json", [{"text": f"text {i}", "source": "ignored"} for i in range(1024)])
    few = write(tmp_path / "few.json", [{"text": f"text {i}"} for i in range(1023)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_calibration(enough)[:2] == ["text 0", "text 1"]
    with pytest.warns(UserWarning, match=r"few\.json: 1023 texts; 1024 or more are advised"):
        assert len(read_calibration(few)) == 1023


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "expected at least one text, found an empty array"),
        ('{"text": "a"}', r"expected a JSON array of .*, found dict"),
        ('[{"text": "a"}, {"txt": "b"}]', r"entry 1: expected an object with a text, found \['txt'\]"),
        ('[{"text": "a"}, "b"]', "entry 1: expected an object with a text, found b"),
        (
            '[{"text": "a"}, {"text": "b"}, {"text": 3}]',
            r"entry 2: expected an object with a text, found \{'text': 3\}",
        ),
        ('[{"text": "  "}]', r"entry 0: expected an object with a text"),
        ("[{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_calibration_files_that_cannot_be_used_name_the_entry(content, message, tmp_path, converted):
    (tmp_path / "calib.json").write_text(content)
    with pytest.raises(ModelError, match=rf"calib\.json: {message}"):
        quantize(
            converted("glm4_moe"), tmp_path / "out", "int4", calibration_data=tmp_path / "calib.json", progress=False
        )
    assert not (tmp_path / "out").exists()


def test_calibration_without_a_quantised_format_is_refused(converted, tmp_path):
    path = write(tmp_path / "calib.json", [{"text": "abc"}])
    with pytest.raises(SettingError, match="calibration_data: nothing is quantised"):
        cl.convert(converted("glm4_moe"), tmp_path / "out", calibration_data=path, progress=False)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "olmoe"])
def test_moments_are_those_of_the_inputs(family, converted, monkeypatch):
    """Against plain sums over what `tapped` hands out, and experts found through `lab.routes`."""
    monkeypatch.setattr("colibri_lab.checkpoint.moments.PENDING", 3000)  # many portions
    lab = cl.open(converted(family))
    box, config, ids = lab.container, lab.config, np.arange(30, 54)
    layer = config.moe_layers[-1]
    seen = {}
    tensors = [(f, t) for f, specs in box.files.items() for t, s in specs.items() if s.part != "float"]
    moments = Moments(
        box, [(f, t) for f, t in tensors if f.startswith((f"layer_{layer}/", f"dense/layer_{layer}.", "dense/h"))]
    )

    def sink(at, site, x, routed):
        moments(at, site, x, routed)
        if at in (layer, None):
            seen[site] = x.copy()

    with tapped(lab.engine, sink):
        lab.logits(ids)
    moments.finish()
    file, expert_file = f"dense/layer_{layer}.bin", f"layer_{layer}/expert_0.bin"
    for name, site in (("q", "attention"), ("v", "attention"), ("o", "attention_out")):
        np.testing.assert_allclose(moments.of(file, name), seen[site].T @ seen[site] / 24, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        moments.of("dense/head.bin", "head"), seen["head"].T @ seen["head"] / 24, rtol=1e-4, atol=1e-4
    )
    everyone = seen["ffn"].T @ seen["ffn"] / 24
    if config.shared != "none":
        np.testing.assert_allclose(moments.of(file, "shared_up"), everyone, rtol=1e-4, atol=1e-5)
    routes = lab.routes(ids)
    routes = routes[routes.layer == layer]
    inner = {}
    for expert in range(config.num_experts):
        x = seen["ffn"][np.sort(routes.token[routes.expert == expert])]
        wanted = (x.T @ x + PRIOR * everyone) / (len(x) + PRIOR)
        for matrix in ("gate", "up"):
            np.testing.assert_allclose(moments.of(expert_file, f"{expert}.{matrix}"), wanted, rtol=1e-4, atol=1e-5)
        parts = box.expert(layer, expert)
        g = x @ parts["gate"].T
        inner[expert] = g / (1 + np.exp(-g)) * (x @ parts["up"].T)
    mean = sum(h.T @ h for h in inner.values()) / sum(len(h) for h in inner.values())
    for expert, h in inner.items():
        wanted = (h.T @ h + PRIOR * mean) / (len(h) + PRIOR)
        np.testing.assert_allclose(moments.of(expert_file, f"{expert}.down"), wanted, rtol=1e-3, atol=1e-5)
    assert moments.of("dense/layer_0.bin", "q") is None
    if not config.tied_embeddings:
        assert moments.of("dense/embed.bin", "embed") is None


def test_taps_are_gone_after_the_block(converted):
    lab = cl.open(converted("glm4_moe"))
    before = [(layer.attention.q, layer.attention.o, layer.router, layer.dense) for layer in lab.engine.layers]
    with pytest.raises(ZeroDivisionError), tapped(lab.engine, lambda *_: 1 / 0):
        lab.logits([1, 2, 3])
    assert before == [(layer.attention.q, layer.attention.o, layer.router, layer.dense) for layer in lab.engine.layers]
    assert np.isfinite(lab.logits([1, 2, 3])).all()


def test_layers_are_calibrated_in_as_many_passes_as_memory_asks_for(converted, tmp_path, monkeypatch):
    """The result does not depend on how many layers fit at a time."""
    path = write(tmp_path / "calib.json", [{"text": chr(97 + i) * 3 + " some words to read"} for i in range(20)])
    source = converted("qwen3_moe")
    for name, room in (("all", 10**9), ("one", 1)):
        monkeypatch.setattr(calibrate, "MOMENT_BYTES", room)
        quantize(source, tmp_path / name, "int4-g32", tensors="all", calibration_data=path, progress=False)
    for file in sorted(p.relative_to(tmp_path / "all") for p in (tmp_path / "all").rglob("*.bin")):
        assert (tmp_path / "all" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file


@pytest.fixture(scope="module")
def tiny() -> Path:
    return container_of("colibri-tiny", progress=False)


@pytest.fixture(scope="module")
def calibrated(tiny, tmp_path_factory):
    """The shipped model with the experts of two layers and its attention in int4, with and without calibration: labs."""
    root = tmp_path_factory.mktemp("calibrated")
    texts = [text.text[i : i + 900] for text in stdlib_texts("calibration")[:40] for i in range(0, 4500, 1500)]
    path = write(root / "calib.json", [{"text": text} for text in texts if text.strip()])
    plan = {
        "rules": [
            {"layers": [5], "format": "int4-row"},
            {"part": "dense", "format": "int4-g64"},
        ]
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize(tiny, root / "plain", "bf16", plan=plan, progress=False)
        options = dict(plan=plan, calibration_data=path, calibration_tokens=6144, progress=False)
        quantize(tiny, root / "gptq", "bf16", **options)
    return root


def test_calibration_beats_plain_rounding_on_texts_it_has_not_seen(calibrated, tiny):
    """Int4, by the divergence of the answers from the 16-bit model's: less noise in it than in the loss."""
    reference = cl.open(tiny, expert_cache_slots=32)
    cut = windows(stdlib_texts("held-out"), reference.tokenizer, tokens=2048)
    found = {}
    for name in ("plain", "gptq"):
        found[name] = compare(cl.open(calibrated / name, router_calib=False), reference, cut, progress=False)
    assert found["gptq"].kl < 0.85 * found["plain"].kl
    assert found["gptq"].router_agreement > found["plain"].router_agreement


def test_calibrated_weights_have_the_same_sizes_and_say_so(calibrated):
    plain, gptq = Container.open(calibrated / "plain"), Container.open(calibrated / "gptq")
    assert plain.info["calibration"] is None and gptq.info["calibration"]["method"] == "gptq"
    assert gptq.info["calibration"]["texts"] > 50
    for file in plain.files:
        assert plain.find(file)[0].stat().st_size == gptq.find(file)[0].stat().st_size
    assert validate(calibrated / "gptq") == []


def test_router_calibration_helps_on_texts_it_has_not_seen(calibrated, tiny):
    """The frequencies of the experts come nearer to those of the 16-bit model, and agreement does not fall."""
    assert (calibrated / "gptq" / router_calib.FILE).exists()
    reference = cl.open(tiny, expert_cache_slots=32)
    cut = windows(stdlib_texts("held-out"), reference.tokenizer, tokens=4096)
    found = {}
    for on in (False, True):
        lab = cl.open(calibrated / "gptq", router_calib=on)
        assert lab.settings["router_calib"] is on
        found[on] = compare(lab, reference, cut, progress=False)
    assert found[True].layers.frequency_distance.mean() < found[False].layers.frequency_distance.mean()
    assert found[True].router_agreement >= found[False].router_agreement - 5e-4


def test_router_calibration_is_a_setting_and_its_absence_is_warned_about(calibrated, tiny):
    with pytest.warns(UserWarning, match="without router calibration: it has none; colibri quantize"):
        assert cl.open(calibrated / "plain").settings["router_calib"] is False
    with pytest.warns(UserWarning, match="without router calibration: router_calib is off"):
        cl.open(calibrated / "gptq", router_calib=False)
    with pytest.raises(SettingError, match=r"router_calib: .*router_calib\.bin is missing; colibri quantize"):
        cl.open(calibrated / "plain", router_calib=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cl.open(calibrated / "gptq").settings["router_calib"] is True
        lab = cl.open(tiny)
        assert lab.settings["router_calib"] is False
    with pytest.raises(SettingError, match="router_calib.bin is missing"):
        lab.configure(router_calib=True)


def test_the_correction_is_added_to_the_routers_logits(calibrated, tmp_path):
    """A large bias on one expert of one layer sends every token there."""
    copy = Path(shutil.copytree(calibrated / "gptq", tmp_path / "copy"))
    biases = {layer: np.zeros(32, np.float32) for layer in range(1, 7)}
    biases[3][17] = 50
    router_calib.write(copy, biases)
    routes = cl.open(copy).routes(np.arange(50, 80))
    assert (routes[routes.layer == 3].groupby("token").expert.apply(lambda e: 17 in set(e))).all()
    assert not (routes[routes.layer == 2].groupby("token").expert.apply(lambda e: 17 in set(e))).all()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: path.write_bytes(b"short"), "at least 8 bytes"),
        (
            lambda path: router_calib.write(path.parent, {1: np.zeros(32, np.float32)}),
            "expected 6 layers of 32 experts",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "payload checksum"),
        (
            lambda path: router_calib.write(path.parent, {n: np.full(32, np.nan, np.float32) for n in range(1, 7)}),
            "expected finite numbers",
        ),
    ],
)
def test_a_damaged_correction_is_refused_by_name(damage, message, calibrated, tmp_path):
    copy = Path(shutil.copytree(calibrated / "gptq", tmp_path / "copy"))
    damage(copy / router_calib.FILE)
    with pytest.raises(ContainerError, match=message):
        cl.open(copy)
    assert any(router_calib.FILE in fault.file for fault in validate(copy))


def test_converting_with_calibration_is_verified(oracle, tmp_path, monkeypatch):
    """Checkpoint to calibrated container in one command; a weight that is far off is found even if its checksum fits."""
    path = write(tmp_path / "calib.json", [{"text": f"text {i} of a few words"} for i in range(12)])
    out = tmp_path / "out"
    options = dict(quantize="int4", group_size=32, tensors="all", calibration_data=path, verify=True, progress=False)
    report = cl.convert(oracle / "qwen2_moe", out, **options)
    assert report.verified_files and not (tmp_path / "out.repacked").exists()
    assert (out / router_calib.FILE).exists() and validate(out) == []
    file = next(Path(f) for f in report.verified_files if "expert_" in f)
    layer, expert = int(file.parent.name.split("_")[1]), int(file.stem.split("_")[1])
    header = Container.open(out).block_layout(layer, expert)
    entry = next(e for e in header.table if e["name"].endswith("up"))
    raw = bytearray(file.read_bytes())
    at = header.payload_offset + entry["scale"][0]
    raw[at : at + entry["scale"][1]] = (np.frombuffer(raw, "<f2", entry["scale"][1] // 2, at) * np.float16(4)).tobytes()
    file.write_bytes(raw)
    monkeypatch.setattr("colibri_lab.checkpoint.binfile.BinFile.check_crc", lambda file: None)
    with pytest.raises(ContainerError, match=r"\.up: calibrated weights must lie within 1 step"):
        verify_container(out, oracle / "qwen2_moe")


def test_routers_are_made_up_for_after_an_interruption(converted, tmp_path, monkeypatch):
    path = write(tmp_path / "calib.json", [{"text": f"text {i} of a few words"} for i in range(12)])
    out, options = tmp_path / "out", dict(calibration_data=path, progress=False)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(calibrate.Calibration, "calibrate_router", interrupt)
        quantize(converted("glm4_moe"), out, "int4-g32", **options)
    assert Container.open(out).info["formats"]["expert"] == "int4-g32" and not (out / router_calib.FILE).exists()
    before = {file: Container.open(out).find(file)[0].stat().st_mtime_ns for file in Container.open(out).files}
    report = quantize(converted("glm4_moe"), out, "int4-g32", **options)
    assert report.files_written == 0 and (out / router_calib.FILE).exists()
    assert before == {file: Container.open(out).find(file)[0].stat().st_mtime_ns for file in before}
    with pytest.raises(ContainerError, match="already there"):
        quantize(converted("glm4_moe"), out, "int4-g32", **options)
