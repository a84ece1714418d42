"""The gallery shows every notebook, with pictures that are there and small."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "gallery"


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("make_gallery", GALLERY / "make_gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_notebook_has_pictures_of_cells_that_exist(gallery):
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in paths] == list(gallery.PICTURES)
    for path in paths:
        cells = {cell.id for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"}
        assert {cell for cell, _ in gallery.PICTURES[path.stem]} <= cells


def test_the_index_is_the_one_that_would_be_written_and_its_pictures_are_small(gallery):
    titles = {
        p.stem: gallery.question(nbformat.read(p, as_version=4)) for p in sorted((ROOT / "notebooks").glob("*.ipynb"))
    }
    text = (GALLERY / "README.md").read_text("utf-8")
    assert text == gallery.index(titles)
    files = [GALLERY / name for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)]
    assert sorted(files) == sorted(GALLERY.glob("*.png")) and len(files) == 18
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) <= 150_000 and sum(sizes) <= 1_500_000


def test_the_readme_links_the_gallery_and_names_every_notebook():
    text = (ROOT / "README.md").read_text("utf-8")
    assert "](gallery/README.md)" in text
    for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text):
        assert (ROOT / name).exists()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"`notebooks/{path.name}`" in text


def test_widgets_become_a_line_and_pictures_lose_colours_only(gallery):
    import base64
    import io

    from PIL import Image

    from colibri_lab.ui.plots import Picture

    png = Picture((4, 2)).png()
    cells = [nbformat.v4.new_code_cell("a"), nbformat.v4.new_code_cell("b")]
    data = {"image/png": base64.b64encode(png).decode()}, {gallery.WIDGET: {}, "text/plain": "WhatIf(…)"}
    for cell, shown, name in zip(cells, data, "ab", strict=True):
        cell.id, cell.outputs = name, [nbformat.v4.new_output("display_data", shown)]
    notebook = gallery.without_widgets(nbformat.v4.new_notebook(cells=cells))
    assert list(notebook.cells[1].outputs[0].data) == ["text/html"]
    small = gallery.picture(notebook, "a")
    assert Image.open(io.BytesIO(small)).size == Image.open(io.BytesIO(png)).size and len(small) < len(png)
    with pytest.raises(KeyError, match="'b' shows no picture"):
        gallery.picture(notebook, "b")
