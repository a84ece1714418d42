"""Every notebook: its form, and one run from top to bottom as `Run All` does it, without a front end."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def shown(cell) -> str:
    """Text form of the cell's value; a first run may also have told on stderr what it compiled."""
    return next(o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result")


@pytest.fixture(scope="module")
def executed():
    """path → the executed notebook; each runs once for all tests of this file."""
    from nbclient import NotebookClient

    done = {}

    def run(path: Path):
        if path not in done:
            notebook = nbformat.read(path, as_version=4)
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            client = NotebookClient(notebook, timeout=300, startup_timeout=300)
            client.execute(cwd=str(path.parent), env=environment)
            done[path] = notebook
        return done[path]

    return run


def test_there_is_a_first_notebook():
    assert NOTEBOOKS[0].name == "00_start_here.ipynb"


@every_notebook
def test_saved_without_outputs_or_machine_specific_metadata(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in code_cells(notebook):
        assert cell.outputs == [] and cell.execution_count is None and cell.metadata == {}


@every_notebook
def test_asks_a_question_first_and_keeps_its_cells_thin(path):
    notebook = nbformat.read(path, as_version=4)
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert "?" in first.source
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= 8, cell.source
        assert "pip install" not in cell.source and "clear_output" not in cell.source


@every_notebook
def test_readers_without_a_kernel_see_a_picture(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    files = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert files
    for name in files:
        assert (path.parent / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.notebook
@every_notebook
def test_runs_from_top_to_bottom(path, executed):
    notebook = executed(path)
    outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
    assert [o for o in outputs if o.output_type == "error"] == []
    stderr = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert not [text for text in stderr if "Traceback" in text or "Exception in thread" in text]


@pytest.mark.notebook
@every_notebook
def test_first_cell_tells_versions_and_machine(path, executed):
    text = shown(code_cells(executed(path))[0])
    for part in ("colibri-lab", "numpy", "threads"):
        assert part in text


@pytest.mark.notebook
@every_notebook
def test_a_picture_comes_early_and_another_outlives_the_kernel(path, executed):
    cells = code_cells(executed(path))
    kinds = [{kind for o in cell.outputs for kind in o.get("data", {})} for cell in cells]
    pictures = [i for i, found in enumerate(kinds) if "image/png" in found]
    widgets = [i for i, found in enumerate(kinds) if "application/vnd.jupyter.widget-view+json" in found]
    assert pictures and pictures[0] <= 1
    assert all(any(p > w for p in pictures) for w in widgets)


@pytest.mark.notebook
def test_start_here_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/00_start_here.ipynb").cells}
    written = printed(cells["generate"])
    assert written.startswith("def read_lines(path):") and len(written) > 60
    stages = shown(cells["first-run"])
    assert "expert_load_wait" in stages and "expert_compute" in stages
    table = shown(cells["data"]).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table}
    before, after = map(float, rows["misses_per_token"])
    assert rows["slots"] == ["8", "16"] and after < before / 2  # as the text below the picture says
    for name in ("check-1", "check-2"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_router_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/01_router.ipynb").cells}
    by_hand, by_engine = (line.split()[2:] for line in printed(cells["by-hand"]).splitlines())
    assert by_hand == by_engine
    assert "experts changed in layer 1: 0" in printed(cells["bias"])
    own, no_shared, _, soft = ast.literal_eval(shown(cells["hits"]))
    assert own[0] == "model" and sum(own[1].values()) == sum(no_shared[1].values())  # the shared expert is no access
    assert soft[1]["hits"] == soft[1]["misses"] == 23 * 6 * 16  # 32 wanted, 16 fit
    texts = [line.split(": ", 1)[1] for line in printed(cells["broken-text"]).splitlines()]
    assert len(set(texts)) == 3
    for name in ("check-overlap", "check-k", "check-rise", "check-1", "check-2", "check-3"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_expert_cache_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/02_expert_cache.ipynb").cells}
    hits, misses, *replayed = map(int, re.findall(r"\d+", printed(cells["record"])))
    assert [hits, misses] == replayed
    columns = [line.split() for line in shown(cells["six"]).splitlines()[1:]]
    assert [row[-3:] for row in columns] == [["0", "0", "0"]] + [["1", "1", "0"]] * 5
    first, one = (line.split()[-3:] for line in shown(cells["cliff-models"]).splitlines()[1:])
    assert first == ["121", "283", "21"] and one == ["128", "288", "24"]
    assert "38 % of its guesses right: nothing is fetched" in printed(cells["prefetch-same"])
    for name in ("check-guess", "check-pool", "check-1", "check-2", "check-3"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_pipeline_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/06_pipeline_profile.ipynb").cells}
    stages, wall, reads = map(float, re.findall(r"[\d.]+(?= ms)", printed(cells["sums"])))
    assert abs(stages - wall) <= 0.01 * wall and reads > 0
    quarters = [[float(word) for word in line.split()[2:]] for line in shown(cells["qwen-table"]).splitlines()[1:]]
    best, worst = quarters[0], quarters[-1]
    assert worst[1] / best[1] > 4 and worst[2] / best[2] < 2  # misses fall by a factor, time by far less
    rows = [line.split() for line in shown(cells["squeeze-table"]).splitlines()[1:]]
    hit_rate, disk_ms = ([float(row[at]) for row in rows] for at in (3, 6))
    assert hit_rate == sorted(hit_rate) and max(disk_ms) == disk_ms[2] and min(disk_ms) == disk_ms[-1]
    assert "4 in a row touch 19, 2.4 times what one needs" in printed(cells["batch-draft"])
    for name in ("check-guess", "check-union", "check-1", "check-2", "check-3"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_memory_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/03_memory.ipynb").cells}
    fragmentation, runs = ast.literal_eval(shown(cells["own-holes"]))
    assert fragmentation["external"] == 0 and runs == 1
    slots = [int(line.split()[2]) for line in printed(cells["budget"]).splitlines()]
    assert slots == sorted(slots) and slots[0] < slots[-1]
    for name in ("check-1", "check-2", "check-3"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_quantisation_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/04_quantisation.ipynb").cells}
    bits = {row.split()[1]: row.split()[2] for row in shown(cells["bits"]).splitlines()[1:]}
    assert (bits["int4-g32-sym"], bits["int4-g32"], bits["int4-g64"]) == ("4.5000", "4.7500", "4.3750")
    hot, cold = (re.split(r"\s{2,}", line) for line in shown(cells["cold"]).splitlines()[2:])
    assert hot[1:3] == cold[1:3] and float(hot[3]) < float(cold[3])  # the same bytes, and the answers move more
    for name in ("check-1", "check-2", "check-3"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_tuning_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/07_tune_your_model.ipynb").cells}
    for setting in ("expert_cache_slots", "policy", "storage", "threads"):
        assert setting in shown(cells["reasons"])
    rows = [line.split() for line in shown(cells["beside-table"]).splitlines()[1:]]
    assert len(rows) == 4 and all(float(row[3]) > 0 and float(row[6]) > 0 for row in rows)  # predicted, measured
    settings = json.loads(printed(cells["export"]))["settings"]
    assert settings["storage"] == "direct" and f"--policy {settings['policy']}" in printed(cells["command"])
    for name in ("check-guess", "check-1", "check-2", "check-3"):
        assert "no answer yet" in shown(cells[name])


@pytest.mark.notebook
def test_claims_shows_what_it_says(executed):
    cells = {cell.id: cell for cell in executed(ROOT / "notebooks/08_claims.ipynb").cells}
    cards = "".join(o.data["text/html"] for c in ("memory", "cache", "formats", "kernels", "hardware")
                    for o in cells[c].outputs if "text/html" in o.get("data", {}))  # fmt: skip
    assert cards.count("Here: ") == 27 and "<b>failed</b>" not in cards
    assert "8 to 12 points" in cards and "<b>implausible</b>" in cards
    for name in ("check-guess", "check-1", "check-2"):
        assert "no answer yet" in shown(cells[name])


# What learners get wrong, and the cells that show what is true.
MISCONCEPTIONS = {
    "8x7B is eight models": "00 parts parts-static",
    "only active weights need memory": "00 touched touched-static",
    "the router chooses per prompt": "01 static overlap olmoe",
    "experts are school subjects": "01 domains domains-table divergence",
    "unused experts can go": "01 masking without",
    "softmax before or after top-k": "01 rules",
    "the correction bias is part of the weight": "01 bias rules",
    "more k is better": "01 k",
    "shared experts are routed": "01 others hits",
    "balanced training is even use": "01 balance",
    "temperature 0 varies as routing is random": "01 flips",
    "hit rate is the cached share": "02 repeats repeats-static",
    "a small cache has a small benefit": "02 cliff cliff-static cliff-models",
    "a smarter policy or pins fix it": "02 policies policies-static",
    "prefetch is free": "02 prefetch prefetch-helps prefetch-hurts prefetch-same prefetch-live",
    "mmap uses no memory": "03 mapped mapped-still",
    "an arena is a collector, held is leaked": "03 moves pointer phases",
    "enough free bytes fit": "03 holes holes-live",
    "4-bit is 4 bits": "04 bits groups",
    "quantise the router too": "04 router router-picture",
    "int4 halves the time": "05 formats formats-one formats-many",
    "more threads are faster": "05 threads threads-static",
    "other last digits are a bug": "05 order order-static",
    "reload loads new C++": "05 edit two-versions",
    "hits up is speed up": "06 qwen qwen-static qwen-table",
    "more cache is always faster": "06 squeeze squeeze-table",
    "prefill is decode": "06 prompt prompt-static prompt-live",
    "batching and drafting are free": "06 batch batch-static batch-draft",
    "one token warms it up": "06 warm warm-static warm-live",
}


@pytest.mark.notebook
@pytest.mark.parametrize("wrong", MISCONCEPTIONS)
def test_every_misconception_meets_its_experiment(wrong, executed):
    number, *names = MISCONCEPTIONS[wrong].split()
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith(number))
    cells = {cell.id: cell for cell in executed(path).cells}
    for name in names:
        assert any(o.output_type != "stream" or o.text.strip() for o in cells[name].outputs), name
        after = [cell for cell in executed(path).cells[list(cells).index(name) :] if cell.cell_type == "markdown"]
        assert after, f"nothing is said after {name}"
