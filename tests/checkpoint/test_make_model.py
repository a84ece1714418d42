"""Random checkpoints: any family, seeded, cut into files or not, readable by others and usable through convert and
open."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.checkpoint import cli as checkpoint_cli
from colibri_lab.checkpoint import make_model as module
from colibri_lab.checkpoint.families import FAMILIES, read_config
from colibri_lab.checkpoint.make_model import FIELDS, make_model, tensor_values
from colibri_lab.checkpoint.source import Source
from colibri_lab.errors import ContainerError, ModelError, SettingError, StorageError

SMALL = dict(hidden=64, layers=2, experts=8, top_k=2, heads=4, kv_heads=2, head_dim=16, expert_width=48, vocab=300)


def small(path, family="olmoe", **more):
    return make_model(path, family, progress=False, **{**SMALL, **more})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_converts_opens_and_generates(tmp_path, family):
    made = small(tmp_path / "hf", family, fields={"use_qk_norm": True} if family == "glm4_moe" else None)
    config = read_config(tmp_path / "hf")
    assert config == made.config
    assert (config.family, config.hidden_size, config.num_layers, config.num_experts) == (family, 64, 2, 8)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.top_k) == (4, 2, 16, 2)
    assert (config.expert_intermediate_size, config.vocab_size) == (48, 300)
    cl.convert(tmp_path / "hf", tmp_path / "box", progress=False)
    assert cl.validate(tmp_path / "box") == []
    lab = cl.open(tmp_path / "box", expert_cache_slots=3)
    run = lab.generate("Grüße, 世界", max_tokens=5, temperature=0.0, stop_at_eos=False)
    assert len(run.tokens) == 5
    assert run.prompt_tokens == len("Grüße, 世界".encode())
    assert np.isfinite(lab.logits(list(range(40)))).all()


def test_sizes_that_are_not_given_keep_their_proportion(tmp_path):
    config = make_model(
        tmp_path / "a", "olmoe", hidden=256, layers=1, vocab=300, experts=2, top_k=1, progress=False
    ).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.expert_intermediate_size) == (2, 2, 128, 256)
    config = make_model(
        tmp_path / "b", "mixtral", hidden=64, layers=1, vocab=300, experts=2, top_k=1, progress=False
    ).config
    assert (config.num_heads, config.head_dim, config.expert_intermediate_size) == (1, 64, 224)


def test_the_same_arguments_write_the_same_bytes_and_another_seed_others(tmp_path):
    files = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        small(tmp_path / name, seed=seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_values_do_not_depend_on_how_the_checkpoint_is_cut(tmp_path):
    small(tmp_path / "one")
    made = small(tmp_path / "many", shard_size="40 kB")
    assert len(made.files) > 3
    assert sorted(p.name for p in (tmp_path / "many").glob("*.safetensors")) == list(made.files)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.nbytes == Source(tmp_path / "many").nbytes
    with safe_open(tmp_path / "one" / "model.safetensors", "numpy") as whole:
        names = set(whole.keys())
    assert set(index["weight_map"]) == names
    one, many = Source(tmp_path / "one"), Source(tmp_path / "many")
    for name in names:
        np.testing.assert_array_equal(one.rows(name), many.rows(name))
    largest = max((tmp_path / "many" / file).stat().st_size for file in made.files)
    assert largest < 60_000


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_weights_are_normal_norms_are_one_and_biases_zero(tmp_path, dtype, stored):
    small(tmp_path / "m", "glm4_moe", dtype=dtype)
    source = Source(tmp_path / "m")
    assert {e.dtype for name, e in source.entries.items() if not name.endswith("correction_bias")} == {stored}
    bias = next(name for name in source.entries if name.endswith("e_score_correction_bias"))
    assert source.entries[bias].dtype == "F32" and not source.rows(bias).any()
    values = np.concatenate([v for v in tensor_values("w", stored, 3_000_001, 1)])
    assert len(values) == 3_000_001
    wide = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else values.astype(np.float32)
    assert abs(wide.mean()) < 1e-4 and wide.std() == pytest.approx(0.02, rel=5e-3)
    assert (np.abs(wide) < 0.02).mean() == pytest.approx(0.6827, abs=3e-3)
    assert np.abs(wide).max() < 0.1
    norm = next(iter(tensor_values("x.norm.weight", stored, 5, 1)))
    assert norm.tolist() == [0x3F80] * 5 if dtype == "bf16" else norm.tolist() == [1.0] * 5


def test_a_million_values_come_from_as_many_draws(monkeypatch):
    whole = np.concatenate(list(tensor_values("w", "BF16", 1_000_003, 2)))
    assert len(np.unique(whole[:4096])) > 1000
    monkeypatch.setattr(module, "CHUNK", 4096)
    np.testing.assert_array_equal(np.concatenate(list(tensor_values("w", "BF16", 1_000_003, 2))), whole)


@pytest.mark.parametrize(
    ("family", "given", "error", "message"),
    [
        ("olmo", {}, SettingError, "family cannot be 'olmo'; did you mean 'olmoe'"),
        ("olmoe", dict(hiden=3), SettingError, "olmoe has no size 'hiden'; did you mean 'hidden'"),
        ("mixtral", dict(shared_width=3), SettingError, "mixtral has no size 'shared_width'"),
        ("olmoe", dict(dense_width=3), SettingError, "olmoe has no size 'dense_width'"),
        ("olmoe", dict(layers=0), SettingError, "layers must be a whole number of at least 1, got 0"),
        ("olmoe", dict(dtype="int8"), SettingError, "dtype cannot be 'int8'"),
        ("olmoe", dict(seed=-1), SettingError, "seed must be a whole number of at least 0, got -1"),
        ("olmoe", dict(shard_size="4G"), SettingError, "shard_size '4G' could be powers of 1000 or of 1024"),
        ("olmoe", dict(vocab=256), SettingError, "vocab must be at least 257.*got 256"),
        ("olmoe", dict(top_k=9), ModelError, "these sizes make no olmoe: top-k 9 exceeds the 8 experts"),
        ("olmoe", dict(heads=4, kv_heads=3), ModelError, "4 attention heads cannot share 3"),
        ("glm4_moe", dict(fields={"n_group": 3}), ModelError, "8 experts in 3 groups"),
    ],
)
def test_impossible_models_leave_nothing_behind(tmp_path, family, given, error, message):
    with pytest.raises(error, match=message):
        small(tmp_path / "m", family, **given)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_written_over_unasked(tmp_path):
    small(tmp_path / "m", seed=1, shard_size="40 kB")
    with pytest.raises(ContainerError, match=r"holds .*overwrite \(--overwrite\) the checkpoint there"):
        small(tmp_path / "m", seed=2)
    made = small(tmp_path / "m", seed=2, overwrite=True)
    assert [p.name for p in (tmp_path / "m").glob("*.safetensors")] == ["model.safetensors"] == list(made.files)
    assert not (tmp_path / "m" / "model.safetensors.index.json").exists()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(ContainerError, match="holds notes.txt; name a new directory$"):
        small(tmp_path / "m", overwrite=True)
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ContainerError, match="expected a directory, found a file"):
        small(tmp_path / "file")


def test_a_disk_that_is_too_small_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(StorageError, match=r"the disk is too small: \d+ bytes needed, 1000 free; nothing was written"):
        small(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_interrupted_run_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return tensor_values(*arguments)

    monkeypatch.setattr(module, "tensor_values", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "m", shard_size="40 kB")
    assert not list((tmp_path / "m").iterdir())


def test_the_command_line_offers_every_size(tmp_path, capsys):
    assert checkpoint_cli.SIZES == tuple(FIELDS)
    sizes = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out = str(tmp_path / "m")
    assert (
        cli.main(
            [
                "make-model",
                "--family",
                "glm4_moe",
                "--output",
                out,
                *sizes,
                "--set",
                "n_group=2",
                "--set",
                "topk_group=1",
            ]
        )
        == 0
    )
    assert f"{out}: glm4_moe, 1 files, " in capsys.readouterr().out
    assert read_config(out).router.groups == 2
    assert cli.main(["make-model", "--family", "olmoe", "--output", out, *sizes, "--set", "oops"]) == 1
    assert "--set needs FIELD=VALUE, got 'oops'" in capsys.readouterr().err
