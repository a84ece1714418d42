"""The notebooks and the run monitor as a reader meets them: in JupyterLab, in a browser, judged by pixels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jupyter_page
import nbformat
import pytest
from jupyter_page import jupyterlab, notebook_page, until

from colibri_lab.errors import MissingTool

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
FAKE = """
from fake_lab import FakeLab
from colibri_lab import ui
lab = FakeLab(slots=8, step_s=0.02)
view = ui.run_monitor(lab, max_tokens=3000, seed=1)
view
"""


def test_missing_browser_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="apt-get install chromium, or set CHROMIUM="):
        jupyter_page.find_browser()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(folder of notebooks, address): copies of the shipped notebooks, so that autosave touches no tracked file."""
    jupyter_page.find_browser()
    root, scratch = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", root, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    with jupyterlab(root, scratch, [ROOT, ROOT / "tests/ui"]) as address:
        yield root, address


@pytest.fixture
def page(tmp_path):
    with notebook_page(tmp_path) as page:
        yield page


def write(root: Path, name: str, *sources: str) -> str:
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), root / name)
    return name


def moves(page, times: int = 5) -> None:
    """The canvases change, and go on changing."""
    for at in range(times):
        before = page.canvases()
        until(lambda before=before: page.canvases() != before, f"canvases change for time {at + 1} of {times}")


def all_differ(now: list[int], before: list[int]) -> bool:
    """Every picture changed, and none is missing (they lose their height while a theme is being swapped)."""
    return len(now) == len(before) and all(a != b for a, b in zip(now, before, strict=True))


def output(page, text: str):
    """The output of the cell that shows a view with this text."""
    return page.page.locator(".jp-OutputArea-output").filter(has_text=text).first


def drawn(view) -> list[str]:
    """What the canvases of one output show."""
    return view.locator("canvas").evaluate_all("canvases => canvases.map((canvas) => canvas.toDataURL())")


def still(page, look: Callable[[], list]) -> list:
    """What `look` sees once that has not changed for a second."""

    def unchanged():
        before = look()
        page.page.wait_for_timeout(1000)
        return before if look() == before else None

    return until(unchanged, "canvases hold still")


def press(page, view, slider: str, keys: str = "ArrowRight ArrowLeft ArrowLeft") -> None:
    """Move a slider of one output by keys; each must change its pixels."""
    handle = view.locator(".widget-slider").filter(has_text=slider).first.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    handle.focus()
    for key in keys.split():
        before = drawn(view)
        page.page.keyboard.press(key)
        until(lambda before=before: drawn(view) != before, f"pixels of {slider} change after {key}")


def blank(page) -> list[dict]:
    return [picture for picture in page.pictures() if picture["colors"] < 8]


def shoot(page, tmp_path: Path, name: str) -> Path:
    path = tmp_path / f"{name}.png"
    page.page.screenshot(path=path)
    return path


def run_whole(page, address: str, name: str) -> None:
    """Open a notebook and run every cell; none may fail."""
    page.open(address, name)
    state = page.run_all()
    assert state["errors"] == [] and state["done"] == state["cells"]


def start_and_stop(view) -> None:
    """A live run in `view` moves its canvases and ends when it is told to."""
    view.locator("button").filter(has_text="Start").click()
    before = drawn(view)
    until(lambda: drawn(view) != before, "live run moves")
    view.locator("button").filter(has_text="Stop").click()
    until(lambda: "stopped after" in view.inner_text() or "done: " in view.inner_text(), "the run has ended")


def no_complaints(page) -> None:
    """Neither a cell nor the browser nor a widget has reported an error."""
    assert page.state()["errors"] == [] and page.complaints == [] and "Error displaying widget" not in page.text()


@pytest.mark.browser
def test_start_here(served, page, tmp_path):
    _, address = served
    run_whole(page, address, "00_start_here.ipynb")
    pictures = page.pictures()
    assert [p["kind"] for p in pictures].count("canvas") == 6 and [p["kind"] for p in pictures].count("img") >= 4
    assert blank(page) == []

    handle = page.slider("slots")
    handle.scroll_into_view_if_needed()
    handle.focus()
    for key in ("ArrowRight", "ArrowLeft", "ArrowLeft"):
        before = page.canvases()
        page.page.keyboard.press(key)
        until(lambda before=before: page.canvases() != before, f"pixels change after {key}")
    until(lambda: "kept: " in page.page.locator("canvas").first.get_attribute("aria-label"), "kept run is named")

    page.button("Stop").click()
    page.button("Start").click()
    moves(page)
    page.button("Stop").click()
    until(lambda: "stopped after" in page.text() or "done: " in page.text(), "the run has ended")
    still(page, page.canvases)
    assert page.state()["errors"] == [] and page.complaints == []
    for trouble in ("Error displaying widget", "Error creating widget", "model not found", "Traceback"):
        assert trouble not in page.text()


@pytest.mark.browser
def test_monitor_in_its_states(served, page, tmp_path):
    root, address = served
    page.open(address, write(root, "states.ipynb", FAKE, "again = view\nagain"))
    assert page.run_all()["errors"] == []
    assert "No run yet: press Start" in page.text() and blank(page) == []

    page.button("Start").click()
    moves(page)
    page.button("Stop").click()
    until(lambda: "stopped after" in page.text(), "stopped")
    sums = still(page, page.canvases)
    assert sums[:4] == sums[4:], shoot(page, tmp_path, "twins")  # the second display shows the same picture

    page.theme("JupyterLab Dark")
    until(lambda: all_differ(page.canvases(), sums), "dark canvases")
    assert blank(page) == [], shoot(page, tmp_path, "dark")
    page.theme("JupyterLab Light")
    until(lambda: page.canvases() == sums, "light canvases as before")

    grid = page.page.locator(".jp-OutputArea canvas").nth(1)
    grid.focus()
    for _ in range(3):
        page.page.keyboard.press("ArrowRight")
    until(lambda: "layer 1, expert 2: " in page.text(), "readout of a cell")
    page.button("Copy").click()
    code = page.page.locator(".jp-OutputArea textarea").last
    until(lambda: code.input_value().startswith("colibri run --model colibri-tiny"), "settings as a command line")
    assert page.complaints == []


@pytest.mark.browser
def test_monitor_error_and_png(served, page, tmp_path):
    root, address = served
    failing = FAKE.replace("step_s=0.02", "step_s=0.002, fail_at=30").replace("seed=1", 'seed=1, live="png"')
    page.open(address, write(root, "error.ipynb", failing))
    assert page.run_all()["errors"] == []
    empty = page.pictures()
    assert [p["kind"] for p in empty] == ["img"] * 4 and blank(page) == []
    page.button("Start").click()
    until(lambda: "layer_3/expert_17.bin: read failed" in page.text(), "the error's message")
    sums = [p["sum"] for p in empty]
    until(lambda: all_differ([p["sum"] for p in page.pictures()], sums), "last picture stays")
    assert page.button("Start").is_enabled() and page.complaints == []
    assert page.page.locator(".colibri-error").count() == 1, shoot(page, tmp_path, "error")


@pytest.mark.browser
def test_expert_cache(served, page, tmp_path):
    _, address = served
    run_whole(page, address, "02_expert_cache.ipynb")
    assert blank(page) == [], shoot(page, tmp_path, "blank")

    tuner = output(page, "Cache tuner")
    assert tuner.locator("canvas").count() == 4
    press(page, tuner, "slots")
    until(
        lambda: "17 slots" not in tuner.inner_text() and "15 slots, lru:" in tuner.inner_text(),
        "the verdict follows",
    )
    tuner.locator("select").nth(2).select_option("global")
    until(
        lambda: "one token: 128" in tuner.inner_text() or "one pool" in tuner.inner_text(),
        "one pool for all layers",
    )
    press(page, tuner, "step")
    tuner.locator(".widget-play button, .jupyter-widget-play button").first.click()
    seen = set()
    until(lambda: seen.add(drawn(tuner)[2]) or len(seen) >= 3, "the grid plays")
    tuner.locator(".widget-play button, .jupyter-widget-play button").first.click()

    press(page, output(page, "Random picks hit"), "slots")
    press(page, output(page, "Predictor markov"), "budget")
    view = output(page, "Run monitor")
    start_and_stop(view)
    no_complaints(page)


@pytest.mark.browser
def test_pipeline_profile(served, page, tmp_path):
    _, address = served
    run_whole(page, address, "06_pipeline_profile.ipynb")
    assert blank(page) == [], shoot(page, tmp_path, "blank")

    view = output(page, "Profile")
    assert view.locator("canvas").count() == 4
    press(page, view, "slots")
    start_and_stop(view)
    still(page, lambda: drawn(view))
    press(page, output(page, "of different places touch"), "tokens")
    press(page, output(page, "prompt tokens together touch"), "tokens")
    press(page, output(page, "From the worst to the best quarter"), "skip", "ArrowRight ArrowLeft")
    no_complaints(page)


@pytest.mark.browser
def test_cache_tuner_in_its_states(served, page, tmp_path):
    root, address = served
    source = """
from colibri_lab import ui
from colibri_lab.trace import TraceRecorder
recorder = TraceRecorder(num_experts=8, top_k=2)
view = ui.cache_tuner(recorder)
view
"""
    record = """
for step in range(60):
    for layer in (0, 1):
        recorder.add(step, layer, "decode", 0, None, [[step % 8, step // 2 % 8 if step // 2 % 8 != step % 8 else (step + 1) % 8]])
"""
    page.open(address, write(root, "tuner.ipynb", source, record))
    assert page.run_all()["errors"] == []
    view = output(page, "no routing yet")
    until(lambda: view.locator("canvas").count() == 4, "empty panels")
    assert blank(page) == []
    view.locator("button").filter(has_text="Reload").click()
    view = output(page, "Cache tuner")
    until(lambda: "of accesses hit" in view.inner_text(), "the recorder's routing is shown")
    until(
        lambda: "What would help" in view.inner_text() or "No other setting helps" in view.inner_text(),
        "the advice",
    )
    light = still(page, lambda: drawn(view))
    page.theme("JupyterLab Dark")
    until(lambda: all_differ(drawn(view), light), "dark canvases")
    assert blank(page) == [], shoot(page, tmp_path, "dark")
    page.theme("JupyterLab Light")
    until(lambda: drawn(view) == light, "light canvases as before")
    view.locator("button").filter(has_text="Copy").click()
    code = view.locator("textarea").last
    until(
        lambda: code.input_value().startswith("colibri replay trace.parquet --policy lru"),
        "settings as a command line",
    )
    assert page.complaints == []


@pytest.mark.browser
def test_quantisation(served, page, tmp_path):
    _, address = served
    run_whole(page, address, "04_quantisation.ipynb")
    kinds = [p["kind"] for p in page.pictures()]
    assert kinds.count("canvas") == 8 and kinds.count("img") >= 5 and blank(page) == []

    for name, key in (("left half", "ArrowRight"), ("format", "ArrowRight"), ("row", "ArrowRight")):
        handle = page.slider(name)
        handle.scroll_into_view_if_needed()
        handle.focus()
        before = page.canvases()
        page.page.keyboard.press(key)
        until(lambda before=before: page.canvases()[:4] != before[:4], f"pixels change after {name}")

    format, _, router = (page.page.locator(".jp-OutputArea select").nth(n) for n in range(3))
    for select, value, says in ((router, "fp32", "bf16, the model as it is"), (format, "int8", "int8: ")):
        select.scroll_into_view_if_needed()
        select.select_option(value)
        until(lambda says=says: says in page.text(), f"known copy at once, {says}")
    format.select_option("int4-g32")
    until(lambda: "int4-g32: " in page.text(), "a new copy is made and read")
    assert page.state()["errors"] == [] and page.complaints == [], shoot(page, tmp_path, "quantisation")


@pytest.mark.browser
def test_tune_your_model(served, page, tmp_path):
    _, address = served
    run_whole(page, address, "07_tune_your_model.ipynb")
    kinds = [p["kind"] for p in page.pictures()]
    assert kinds.count("canvas") == 2 and kinds.count("img") >= 7 and blank(page) == [], shoot(page, tmp_path, "blank")

    view = output(page, "of what all experts would need")
    press(page, view, "percent", "ArrowRight ArrowLeft")
    field = view.locator("input[type=text]").first
    field.fill("data/traces/warp_olmoe_1b7b_299.jsonl")
    field.press("Enter")
    until(lambda: "3.8 GB, 50 % of what" in view.inner_text(), "a trace of another model")
    before = drawn(view)
    field.fill("no/such/model")
    field.press("Enter")
    until(lambda: "no/such/model: no such directory" in view.inner_text(), "what is wrong with the path")
    assert drawn(view) == before and view.locator(".colibri-error").count() == 1  # the last picture stays
    field.fill("data/colibri-tiny")
    field.press("Enter")
    until(lambda: "MB, 50 % of what" in view.inner_text() and not view.locator(".colibri-error").count(), "recovered")
    no_complaints(page)


@pytest.mark.browser
def test_kernels(served, page, tmp_path):
    _, address = served
    run_whole(page, address, "05_kernels.ipynb")
    kinds = [p["kind"] for p in page.pictures()]
    assert kinds.count("canvas") == 5 and kinds.count("img") >= 7 and blank(page) == [], shoot(page, tmp_path, "blank")

    press(page, output(page, "degree"), "degree", "ArrowRight ArrowLeft")
    view = output(page, "Kernel bench")
    press(page, view, "tokens", "ArrowRight ArrowRight ArrowLeft")
    view.locator("select").nth(1).select_option("fp16")
    before = still(page, lambda: drawn(view))
    view.locator("button").filter(has_text="Measure").click()
    until(lambda: drawn(view) != before, "a point is added to the roofline")
    until(lambda: "measuring" not in view.inner_text(), "the measurement has ended")
    text, becomes = view.locator("textarea").nth(0), view.locator("textarea").nth(1)
    text.fill("no such text in the kernel")
    becomes.fill("x")
    view.locator("button").filter(has_text="Try").click()
    until(lambda: view.locator(".colibri-error").count() == 1, "an edit that cannot be made is told")
    no_complaints(page)
