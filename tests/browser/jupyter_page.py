"""A notebook in a real JupyterLab in a real browser: start both, run cells, press controls, look at pixels.

JupyterLab is asked directly (its application object is exposed to the page) for kernel and cell state; what a reader
sees is judged by pixels alone. Settings, workspaces and browser profile live in a scratch folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from colibri_lab.errors import MissingTool

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-background-networking",
    "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
]  # fmt: skip

STATE = """() => {
  const open = [...(window.jupyterapp?.shell.widgets("main") || [])];
  const panel = open.find((widget) => widget.sessionContext && widget.content?.widgets);
  const cells = (panel?.content?.widgets || []).filter((cell) => cell.model.type === "code");
  if (!cells.length) return null;
  const errors = [];
  for (const cell of cells) {
    const outputs = cell.model.outputs.toJSON();
    for (const o of outputs) if (o.output_type === "error") errors.push(`${o.ename}: ${o.evalue}`);
  }
  const done = cells.filter((cell) => cell.model.executionCount || !cell.model.sharedModel.source.trim()).length;
  const kernel = panel.sessionContext.session?.kernel;
  return {id: panel.id, kernel: kernel?.status || "none", connection: kernel?.connectionStatus || "none",
          cells: cells.length, done, errors};
}"""

# What JupyterLab itself shows, for the message of a notebook that did not open.
SHOWN = """() => ({
  widgets: [...(window.jupyterapp?.shell.widgets("main") || [])].map((widget) => widget.id),
  dialog: document.querySelector(".jp-Dialog")?.innerText || "",
  splash: !!document.querySelector("#jupyterlab-splash"),
})"""

# Every picture in the outputs: a checksum of its pixels and how many different colours it has (one means blank).
PICTURES = """() => [...document.querySelectorAll(".jp-OutputArea canvas, .jp-OutputArea img")]
  .filter((e) => e.getBoundingClientRect().height > 60)
  .map((e) => {
    const copy = document.createElement("canvas");
    copy.width = 240; copy.height = 160;
    const pen = copy.getContext("2d", {willReadFrequently: true});
    pen.drawImage(e, 0, 0, 240, 160);
    const pixels = new Uint32Array(pen.getImageData(0, 0, 240, 160).data.buffer);
    let sum = 7;
    for (const p of pixels) sum = (Math.imul(sum, 31) + p) | 0;
    return {kind: e.tagName.toLowerCase(), sum, colors: new Set(pixels).size};
  })"""


def find_browser() -> str:
    """Path of a Chromium. Raises MissingTool saying how to get one."""
    given = os.environ.get("CHROMIUM")
    found = given or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        raise MissingTool(
            f"no browser for the notebook tests: looked for {', '.join(BROWSERS)} on PATH; "
            "apt-get install chromium, or set CHROMIUM=/path/to/chromium"
        )
    return found


@contextlib.contextmanager
def jupyterlab(root: Path, scratch: Path, python_path: list[Path] | None = None) -> Iterator[str]:
    """Serve `root` on loopback; yields the address with `{workspace}` and `{path}` to fill in.

    Kernels see `python_path` first.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token = secrets.token_hex(12)
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    env = os.environ | {name: str(scratch / folder) for name, folder in folders.items()}
    paths = [*map(str, python_path or []), *filter(None, [os.environ.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    quiet = scratch / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false"}')
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": root,
        "IdentityProvider.token": token,
        "LabApp.expose_app_in_browser": True,
        "LabApp.news_url": None,
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LabApp.extension_manager": "readonly",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with open(scratch / "jupyterlab.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        base = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{base}/api/status?token={token}", server, scratch), "JupyterLab answers", 180)
        yield base + "/lab/workspaces/{workspace}/tree/{path}?token=" + token
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            server.wait(20)


def _answers(url: str, server: subprocess.Popen, scratch: Path) -> bool:
    if server.poll() is not None:
        raise RuntimeError("JupyterLab ended:\n" + (scratch / "jupyterlab.log").read_text()[-2000:])
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def until(ready: Callable, what: str, seconds: float = 60, every_s: float = 0.1):
    """The first true value of `ready()`. Raises TimeoutError naming `what`; a busy machine is given time."""
    end = time.monotonic() + seconds
    while True:
        value = ready()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds} s; last answer {value!r}")
        time.sleep(every_s)


class NotebookPage:
    """One open notebook. `complaints` are error messages of the browser's console."""

    def __init__(self, page):
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda m: m.type == "error" and self.complaints.append(m.text))
        page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def open(self, address: str, path: str) -> None:
        """Open the notebook alone, in a workspace of its own, and wait for its kernel; the file browser is folded away.

        A page that JupyterLab did not finish within a minute is loaded once more. Raises TimeoutError with what it shows.
        """
        for last in (False, True):
            self.page.goto(address.format(workspace=secrets.token_hex(4), path=path))
            try:
                until(lambda: (self.state() or {}).get("kernel") == "idle", "kernel idle")
                break
            except TimeoutError as error:
                if last:
                    shown = self.page.evaluate(SHOWN)
                    raise TimeoutError(f"{path}: {error}; {self.state()}; {shown}; {self.complaints}") from None
                self.complaints.clear()
        self.page.evaluate("(id) => window.jupyterapp.shell.activateById(id)", self.state()["id"])
        self.command("application:toggle-left-area")

    def theme(self, name: str) -> None:
        """Change the theme. JupyterLab takes its splash away 200 ms later, and stumbles over another change before that."""
        until(lambda: self.page.locator("#jupyterlab-splash").count() == 0, "the splash of the last change is gone")
        self.command("apputils:change-theme", theme=name)

    def command(self, name: str, **args) -> None:
        """A JupyterLab command, started and not waited for."""
        self.page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, args])

    def state(self) -> dict | None:
        return self.page.evaluate(STATE)

    def run_all(self, seconds: float = 400) -> dict:
        """Run every cell; returns cells, done, errors, kernel."""
        self.command("notebook:run-all-cells")

        def ended():
            s = self.state()
            return s if s and (s["errors"] or (s["done"] == s["cells"] and s["kernel"] == "idle")) else None

        state = until(ended, "all cells run", seconds)
        self.page.wait_for_timeout(1500)
        return state

    def pictures(self) -> list[dict]:
        return self.page.evaluate(PICTURES)

    def canvases(self) -> list[int]:
        """Checksums of the canvases only: what moves while a run lasts."""
        return [p["sum"] for p in self.pictures() if p["kind"] == "canvas"]

    def button(self, name: str, nth: int = 0):
        return self.page.locator(".jp-OutputArea button").filter(has_text=name).nth(nth)

    def slider(self, name: str, nth: int = 0):
        """The handle of a slider, to focus and to press keys on."""
        sliders = self.page.locator(".jp-OutputArea .widget-slider").filter(has_text=name)
        return sliders.nth(nth).locator(".noUi-handle").first

    def text(self) -> str:
        return self.page.inner_text(".jp-Notebook")


@contextlib.contextmanager
def notebook_page(scratch: Path, width: int = 1280, height: int = 1000) -> Iterator[NotebookPage]:
    """A fresh browser. Raises MissingTool without one."""
    from playwright.sync_api import sync_playwright

    browser = find_browser()
    with sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            str(scratch / "profile"),
            executable_path=browser,
            headless=True,
            args=FLAGS,
            viewport={"width": width, "height": height},
        )
        try:
            yield NotebookPage(context.pages[0] if context.pages else context.new_page())
        finally:
            context.close()
