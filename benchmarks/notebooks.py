"""How fast the notebooks' views answer, in a real JupyterLab and Chromium, judged by pixels.

    python benchmarks/notebooks.py [00 02 …] [--output benchmarks/results] [--pictures DIR]

Each notebook is copied, opened and run from top to bottom. Then, of each of its sliders:

first pixels   from a key press until a picture has changed, ten presses 0.6 s apart
settled        from the last of twenty presses at 30 a second until no picture changes any more

and of each view with Start and Stop:

live           changes of the pictures per second, while the run lasts and for at most 1.5 s
still          from the press of Stop until no picture changes any more

and, where a cell holds the kernel with a run that the view shows, its live rate as "in a cell".

Writes notebooks.md and notebooks.json, which hold what other notebooks measured before; `--pictures` keeps screenshots.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from colibri_lab import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "browser"))
from jupyter_page import NotebookPage, jupyterlab, notebook_page  # noqa: E402

PRESSES, GAP_MS, BURST, PERIOD_MS = 10, 600, 20, 33
LIVE_S, REST_MS = 1.5, 3000

NOTEBOOKS = ("00", "01", "02", "03", "04", "05", "06", "07", "08")
AIMS = ("first pixels below 150 ms (median)", "settled below 700 ms", "live at least 10 per s", "still below 300 ms")

# Counts pictures as changed when the pixels of any of them differ from one animation frame to the next.
WATCH = """() => {
  const small = document.createElement("canvas");
  small.width = 128; small.height = 80;
  const pen = small.getContext("2d", {willReadFrequently: true});
  const seen = new Map();
  const watch = window.colibriWatch = {changes: [], presses: []};
  const sum = (picture) => {
    pen.clearRect(0, 0, 128, 80);
    pen.drawImage(picture, 0, 0, 128, 80);
    let total = 5;
    for (const p of new Uint32Array(pen.getImageData(0, 0, 128, 80).data.buffer)) total = (Math.imul(total, 33) ^ p) | 0;
    return total;
  };
  const look = () => {
    let changed = false;
    for (const picture of document.querySelectorAll(".jp-OutputArea canvas, .jp-OutputArea img")) {
      const box = picture.getBoundingClientRect();
      if (box.height < 60 || box.bottom < 0 || box.top > innerHeight || picture.complete === false) continue;
      const now = sum(picture);
      changed ||= seen.has(picture) && seen.get(picture) !== now;
      seen.set(picture, now);
    }
    if (changed) watch.changes.push(performance.now());
    requestAnimationFrame(look);
  };
  for (const kind of ["keydown", "pointerdown"])
    document.addEventListener(kind, () => watch.presses.push(performance.now()), true);
  requestAnimationFrame(look);
}"""


class Watched:
    """A notebook whose pictures are watched frame by frame."""

    def __init__(self, page: NotebookPage, pictures: Path | None, name: str):
        self.page, self.pictures, self.name, self.shots = page, pictures, name, 0
        page.page.evaluate(WATCH)

    def clear(self) -> None:
        self.page.page.evaluate("() => { colibriWatch.changes = []; colibriWatch.presses = []; }")

    def seen(self) -> tuple[list[float], list[float]]:
        """(changes, presses) since `clear`, in ms."""
        return tuple(self.page.page.evaluate("() => [colibriWatch.changes, colibriWatch.presses]"))

    def pause(self, ms: float) -> None:
        self.page.page.wait_for_timeout(ms)

    def shoot(self) -> None:
        if self.pictures:
            self.shots += 1
            self.page.page.screenshot(path=self.pictures / f"{self.name}_{self.shots:02}.png")

    def slider(self, slider) -> dict:
        """Milliseconds to the first changed pixels, one press after the other, and until a burst has settled."""
        handle = slider.locator(".noUi-handle").first
        handle.scroll_into_view_if_needed()
        handle.focus()
        self.pause(1000)
        first, missed = [], 0
        for _ in range(PRESSES):
            self.clear()
            self.page.page.keyboard.press(_direction(handle, 1))
            self.pause(GAP_MS)
            changes, presses = self.seen()
            after = [at - presses[0] for at in changes if at >= presses[0]]
            first += after[:1]
            missed += not after
        self.pause(1000)
        self.clear()
        key = _direction(handle, BURST)
        for i in range(BURST):
            self.page.page.keyboard.press(key or ("ArrowLeft", "ArrowRight")[i % 2])
            self.pause(PERIOD_MS)
        self.pause(REST_MS)
        changes, presses = self.seen()
        self.shoot()
        return {
            "first_ms": statistics.median(first) if first else None, "first_worst_ms": max(first, default=None),
            "n": len(first), "unchanged": missed, "settled_ms": max(0.0, changes[-1] - presses[-1]) if changes else None,
            "burst_redraws": len(changes),
        }  # fmt: skip

    def live(self, view) -> dict:
        """Redraws per second of a run that Start begins, and milliseconds from Stop to stillness."""
        start, stop = (view.locator("button").filter(has_text=name).first for name in ("Start", "Stop"))
        start.scroll_into_view_if_needed()
        self.pause(1000)
        self.clear()
        start.click()
        self.pause(1000 * LIVE_S)
        self.shoot()
        stop.click()
        self.pause(2000)
        changes, (begun, stopped) = self.seen()
        moving = [at for at in changes if at <= stopped]
        lasted = moving[-1] - begun
        ran_out = stopped - moving[-1] > 500  # nothing was left to stop
        tail = [at - stopped for at in changes if at > stopped]
        return {
            "live_hz": 1e3 * len(moving) / lasted,
            "live_s": lasted / 1e3,
            "still_ms": None if ran_out else max(tail, default=0.0),
        }

    def blocked(self, cell: int) -> dict:
        """Redraws per second while a code cell runs once more."""
        view = self.page.page.locator(".jp-OutputArea-output").filter(
            has=self.page.page.locator("button:has-text('Start')")
        )
        view.first.scroll_into_view_if_needed()
        self.clear()
        begun = time.perf_counter()
        self.page.page.evaluate(RUN_CELL, cell)
        seconds = time.perf_counter() - begun
        changes, _ = self.seen()
        self.shoot()
        return {"live_hz": len(changes) / seconds, "live_s": seconds}


# Run the n-th code cell without moving the page.
RUN_CELL = """async (n) => {
  const panel = jupyterapp.shell.currentWidget;
  const cell = panel.content.widgets.filter((c) => c.model.type === "code")[n];
  await panel.sessionContext.session.kernel.requestExecute({code: cell.model.sharedModel.source}).done;
}"""


def _direction(handle, room: int) -> str | None:
    """The arrow key with more room; None where it has less than `room`."""
    low, now, high = (float(handle.get_attribute(f"aria-value{end}")) for end in ("min", "now", "max"))
    if max(now - low, high - now) < room:
        return None
    return "ArrowLeft" if now - low > high - now else "ArrowRight"


def measure(address: str, name: str, notebook: Path, pictures: Path | None) -> dict:
    """{"open_s", "run_all_s", "errors", "rows"} of one notebook."""
    with tempfile.TemporaryDirectory() as scratch, notebook_page(Path(scratch), 1280, 1400) as page:
        begun = time.perf_counter()
        page.open(address, notebook.name)
        open_s = time.perf_counter() - begun
        begun = time.perf_counter()
        state = page.run_all()
        run_all_s = time.perf_counter() - begun
        watched = Watched(page, pictures, name)
        watched.shoot()
        sources = [cell["source"] for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        rows, live = [], ""
        cells = page.page.locator(".jp-CodeCell")
        for i in range(cells.count()):
            view = cells.nth(i)
            title = _title("".join(sources[i]), "\n".join(map("".join, sources[:i])))
            sliders = view.locator(".jp-OutputArea .widget-slider:visible")
            for k in range(sliders.count()):
                label = (sliders.nth(k).locator(".widget-label").first.text_content() or "").strip()
                rows.append({"view": title, "control": label, **watched.slider(sliders.nth(k))})
            if view.locator(".jp-OutputArea button", has_text="Start").count():
                rows.append({"view": title, "control": "Start, Stop", **watched.live(view)})
                live = title
        for i, source in enumerate(map("".join, sources)):
            if "run_once()" in source and "ui." not in source:  # not one that makes a view of its own
                rows.append({"view": live, "control": "in a cell", **watched.blocked(i)})
                break
        return {
            "open_s": open_s, "run_all_s": run_all_s, "errors": state["errors"] + page.complaints, "rows": rows,
        }  # fmt: skip


def _title(source: str, before: str) -> str:
    """`what_if(lessons.touched, …)` is `what_if touched`; a name is what it was made of in the cells `before`."""
    last = source.strip().splitlines()[-1]
    made = re.findall(rf"^{last} = .*", before, re.M) if last.isidentifier() else []
    calls = re.findall(r"ui\.(\w+)\((?:[\w.]*lessons\.(\w+))?", "\n".join([*made, source]))
    return " ".join(filter(None, calls[-1])) if calls else last


def report(found: dict) -> str:
    lines = [
        "# How fast the notebooks answer", "",
        f"`python benchmarks/notebooks.py` in JupyterLab and headless Chromium, on {found['cores']} cores; what is measured stands",
        "in that file. Pixels are judged once per animation frame, which by itself costs up to 17 ms. Aims, on an idle machine",
        "with two cores: " + ", ".join(AIMS) + ".", "",
        "| notebook | open to idle s | run all s | errors |", "|---|--:|--:|---|",
    ]  # fmt: skip
    books = found["notebooks"]
    for name, one in sorted(books.items()):
        lines.append(f"| {name} | {one['open_s']:.1f} | {one['run_all_s']:.1f} | {len(one['errors']) or 'none'} |")
    lines += ["", "| notebook | view | control | first pixels ms, median (worst, n) | settled ms | live per s | still ms |",
              "|---|---|---|--:|--:|--:|--:|"]  # fmt: skip

    def shown(row: dict, key: str, places: int = 0) -> str:
        return "" if row.get(key) is None else f"{row[key]:.{places}f}"

    for name, one in sorted(books.items()):
        for row in one["rows"]:
            if row.get("n") == 0:
                continue  # a control of the next press of a button, which changes no picture by itself
            first = f"{row['first_ms']:.0f} ({row['first_worst_ms']:.0f}, {row['n']})" if row.get("first_ms") else ""
            lines.append(
                f"| {name} | {row['view']} | {row['control']} | {first} | {shown(row, 'settled_ms')} | "
                f"{shown(row, 'live_hz', 1)} | {shown(row, 'still_ms')} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("notebooks", nargs="*", default=NOTEBOOKS, help="numbers; default all")
    p.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--pictures", type=Path)
    args = p.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    data = args.output / "notebooks.json"
    found = json.loads(data.read_text()) if data.exists() else {"notebooks": {}}
    found["cores"] = machine.cores()[0]
    with tempfile.TemporaryDirectory(prefix="colibri-notebooks-") as temporary:
        served, scratch = Path(temporary) / "served", Path(temporary) / "jupyter"
        scratch.mkdir()
        shutil.copytree(ROOT / "notebooks", served, ignore=shutil.ignore_patterns(".*"))
        with jupyterlab(served, scratch, [ROOT]) as address:
            for number in args.notebooks:
                notebook = next(served.glob(f"{number}_*.ipynb"))
                found["notebooks"][number] = measure(address, number, notebook, args.pictures)
                data.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{notebook.name}: {len(found['notebooks'][number]['errors'])} errors", file=sys.stderr)
    (args.output / "notebooks.md").write_text(report(found))
    print(report(found))


if __name__ == "__main__":
    main()
