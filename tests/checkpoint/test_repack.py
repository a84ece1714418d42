"""Containers as the input: of another container, and of an archive."""

from __future__ import annotations

import shutil
import tarfile

import numpy as np
import pytest

from colibri_lab.checkpoint.binfile import write_v0
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.convert import convert
from colibri_lab.checkpoint.export import export
from colibri_lab.checkpoint.layout import npy_path
from colibri_lab.checkpoint.validate import validate
from colibri_lab.cli import main
from colibri_lab.errors import ContainerError, TokenizerError


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_a_container_is_quantised_without_the_checkpoint(converted, out):
    """fp32 container → int8 with other blocks: the same as from the checkpoint itself."""
    convert(
        converted("glm4_moe", quantize="fp32"), out, quantize="int8", expert_block_size=2, verify=True, progress=False
    )
    direct = converted("glm4_moe", quantize="int8", expert_block_size=2)
    for file in Container.open(out).files:
        if "expert_" in file:
            assert (out / file).read_bytes() == (direct / file).read_bytes()


def test_a_quantised_container_is_no_source(converted, out):
    with pytest.raises(ContainerError, match="is int8 already; quantising twice only loses"):
        convert(converted("glm4_moe", quantize="int8"), out, progress=False)


def test_npy_and_version_0_experts_are_packed_by_convert(converted, tmp_path, out):
    plain = shutil.copytree(converted("glm4_moe", quantize="fp16"), tmp_path / "plain")
    for name in ("layer_1/expert_0.bin", "layer_1/expert_1.bin"):
        tensors = Container.open(plain).read(name).tensors
        (plain / name).unlink()
        if name.endswith("0.bin"):
            for tensor in tensors.values():
                np.save(plain / npy_path(name, tensor.name), tensor.array().astype(np.float16))
        else:
            write_v0(plain / name, np.concatenate([tensor.array().reshape(-1) for tensor in tensors.values()]))
    convert(plain, out, progress=False)
    original = converted("glm4_moe", quantize="fp16")
    assert validate(out) == []
    for expert in range(2):
        name = f"layer_1/expert_{expert}.bin"
        assert (out / name).read_bytes() == (original / name).read_bytes()


def test_an_archive_holds_everything_that_opens_again(converted, tmp_path):
    directory = converted("glm4_moe")
    names = export(directory, tmp_path / "model.tar")
    assert "glm4_moe/tokenizer.json" in names
    with tarfile.open(tmp_path / "model.tar") as tar:
        assert tar.getnames() == names
        tar.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked/glm4_moe"
    assert validate(unpacked) == []
    for name in names:
        assert (tmp_path / "unpacked" / name).read_bytes() == (directory.parent / name).read_bytes()


def test_an_archive_without_the_right_tokenizer_is_refused(container, tmp_path, edit_json):
    edit_json(container / "tokenizer.json", lambda t: t.update(truncation=None, padding=None))
    with pytest.raises(TokenizerError, match="not the tokenizer this model was converted with"):
        export(container, tmp_path / "model.tar")
    (container / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="tokenizer.json: file is missing"):
        export(container, tmp_path / "model.tar")
    assert not (tmp_path / "model.tar").exists()


def test_the_command_packs_and_does_not_replace(converted, tmp_path, capsys):
    directory, archive = converted("glm4_moe"), tmp_path / "model.tar"
    assert main(["export", str(directory), "--output", str(archive)]) == 0
    assert "tar -xf" in capsys.readouterr().out
    before = archive.read_bytes()
    assert main(["export", str(directory), "--output", str(archive)]) == 1
    assert "model.tar: there is a file already" in capsys.readouterr().err and archive.read_bytes() == before
    assert main(["export", str(directory), "--output", str(archive), "--overwrite"]) == 0
