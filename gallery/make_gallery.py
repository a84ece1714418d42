"""Run every notebook and keep what it shows: `make gallery`.

    python gallery/make_gallery.py [NAME ...]        NAME: the beginning of a notebook's name, such as 02

Writes html/NAME.html (not kept in git), a few small PNGs of each notebook's pictures, and README.md, which shows them.
A notebook that fails ends this with its error; what was made before stays.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from PIL import Image  # matplotlib brings it
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
STANDS_FOR = "<em>An interactive view stands here; the next picture is what it shows. Run the notebook to move its controls.</em>"
COLORS = 128  # of a kept picture, which makes it a third as large
# Notebook → (cell whose picture is kept, what to see on it).
PICTURES = {
    "00_start_here": [
        ("static", "Two runs with 8 (grey) and 16 of 32 experts in memory: the same text, well under half of the misses."),
        ("parts-static", "8x7B is not eight models: only the experts repeat, and a token uses a quarter of the weights."),
    ],
    "01_router": [
        ("domains", "Which experts work for which kind of text, in the first and in the last layer."),
        ("masking", "A domain's favourite experts taken away: its own loss rises, that of others hardly."),
    ],
    "02_expert_cache": [
        ("tuner-static", "The cache tuner on a recorded run of OLMoE: hit rates of all sizes between lru and knowing the future."),
        ("policies-static", "A dozen points lie between lru and the oracle, and the policies share two of them."),
    ],
    "03_memory": [
        ("open", "The memory pool: what is handed out to whom, what the system has really given, plan and arenas."),
        ("mapped-still", "A mapped file takes memory, but not the process's own."),
    ],
    "04_quantisation": [
        ("groups", "One matrix in 4 bits: what is left of its small columns with a scale for each group."),
        ("hot", "The model with its most used experts in int8 and the others in int4: bytes against answers."),
    ],
    "05_kernels": [
        ("bench-static", "Products under two roofs: bytes decide for one row, operations for many."),
        ("formats-many", "With 64 rows fewer bits save hardly any time."),
    ],
    "06_pipeline_profile": [
        ("view-static", "Where a token's time goes: waiting is not reading, and a higher hit rate is not a higher speed."),
        ("squeeze", "More slots of the same memory: the hit rate climbs, and for a while the disk works more."),
    ],
    "07_tune_your_model": [
        ("olmoe", "Predicted speed of a model that is not here, from a trace of its routing and a probe of this machine."),
        ("beside", "Predicted, with the band that holds nine of ten runs, and measured."),
    ],
    "08_claims": [
        ("picture", "Two dozen claims in print, put to the test."),
        ("gain-static", "8 to 12 points from a better policy were claimed; this is what recorded routing shows."),
    ],
}  # fmt: skip


def execute(path: Path):
    """The notebook with the outputs of one run."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, startup_timeout=120, store_widget_state=False)
    client.execute(cwd=str(path.parent), env=os.environ | {"PYTHONPATH": str(ROOT)})
    return notebook


def without_widgets(notebook):
    """Outputs that need a running kernel become a line that says so."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}):
                output.data = nbformat.from_dict({"text/html": STANDS_FOR})
    return notebook


def picture(notebook, cell_id: str) -> bytes:
    """The PNG that a cell shows, with fewer colours. Raises KeyError naming the cell that shows none."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []) if cell.id == cell_id else ():
            if "image/png" in output.get("data", {}):
                image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
                out = io.BytesIO()
                image.quantize(COLORS, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
                return out.getvalue()
    raise KeyError(f"cell {cell_id!r} shows no picture")


def question(notebook) -> str:
    """The notebook's title, which is a question."""
    return notebook.cells[0].source.splitlines()[0].removeprefix("# ")


def index(titles: dict[str, str]) -> str:
    """The gallery's README.md: a section for each notebook."""
    lines = [
        "# Gallery",
        "",
        "What the notebooks show, from one run of all of them with `make gallery`, which also writes them as ",
    ]
    lines[-1] += "HTML into `gallery/html`. Times are of one machine that had other work as well; counts are exact."
    for name, title in titles.items():
        lines += ["", f"## [{title}](../notebooks/{name}.ipynb)"]
        for cell, seen in PICTURES[name]:
            lines += ["", f"![{seen}]({name[:2]}_{cell}.png)", "", f"*{seen}*"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of notebook names (default: all)")
    wanted = tuple(parser.parse_args().names) or ("",)
    (HERE / "html").mkdir(exist_ok=True)
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    for path in tqdm([p for p in paths if p.stem.startswith(wanted)], "notebooks"):
        notebook = execute(path)
        for cell, _ in PICTURES[path.stem]:
            (HERE / f"{path.stem[:2]}_{cell}.png").write_bytes(picture(notebook, cell))
        (HERE / "html" / f"{path.stem}.html").write_text(
            exporter.from_notebook_node(without_widgets(notebook))[0], "utf-8"
        )
    titles = {path.stem: question(nbformat.read(path, as_version=4)) for path in paths}
    (HERE / "README.md").write_text(index(titles), "utf-8")


if __name__ == "__main__":
    main()
