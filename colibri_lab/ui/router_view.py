"""The router explorer: one text, token by token and layer by layer, from logits to weights, under any k and temperature.

Panels follow the sliders at once, by arithmetic on what the routers saw; reading a text and measuring a loss need the model
and happen on a thread of their own.
"""

from __future__ import annotations

import html
import threading
from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from ..engine.routers import TopK
from ..errors import ColibriError
from ..routing import Reading, read, texts
from ..routing.reading import token_nats
from . import router_frames as frames
from .newest import Newest
from .plots import Picture
from .router_plots import draw_panels, expert_colors, token_window
from .theme import LIGHT, bytes_text
from .view import View, labelled, line

OWN_TEXT = "your own text"
TOKEN = "display:inline-block;white-space:pre;line-height:1.5;margin-right:3px;padding:0 1px;border-radius:3px;"
BOX = (
    "max-height:104px;overflow-y:auto;padding:3px 6px;font:12px monospace;color:var(--jp-ui-font-color1,inherit);"
    "border:1px solid var(--jp-border-color2,#bbb)"
)
WINDOW = 160  # most tokens of the text shown around the one looked at


def router_explorer(lab, text: str | None = None, live: str = "auto") -> RouterExplorer:
    """Look into `lab`'s routers: sliders for token, layer, k and temperature, over `text` or the project's prompts.

    `live` is "auto", "canvas" or "png". Raises `MissingTool` for live="canvas" without anywidget; a text that cannot be read
    puts the view into the state "error".
    """
    return RouterExplorer(lab, text, live)


class RouterExplorer(View):
    """View of a `Lab`'s routers; see `router_explorer`. Naming it in a cell shows it.

    `state` is "empty", "ready", "busy" (reading, or measuring a loss) or "error" (then `error` is the exception and the last
    picture stays). `reading` is the text on show; `look` the token, layer and router.
    """

    _remedy = "Change a control to try again."

    def __init__(self, lab, text: str | None = None, live: str = "auto"):
        super().__init__(Newest(self._serve, "colibri-router"), [230] * 4, live)
        self.lab = lab
        self.reading: Reading | None = None
        self.look: frames.Look | None = None
        self._model = threading.Lock()  # whoever holds it may use the lab for this view
        self._nats: dict[tuple, float] = {}  # (text, k, temperature) → loss
        self._make_controls(text)
        if self.text.value:
            self._serve(self._wanted())
        else:
            self._paint()

    def read(self, text: str) -> Reading:
        """Read `text` now, in this thread, and show it. Raises what the model raises."""
        with self._lock, self._silently():
            self.text.value = text
        self._work(self._wanted())
        return self.reading

    def measure(self) -> float:
        """Nats per token of the text at the present k and temperature, now, in this thread."""
        with self._lock:
            wanted = self._wanted()
        self._work(wanted)
        return self._nats[wanted]

    def as_trained(self, _=None) -> None:
        """Back to the model's own k and temperature."""
        with self._lock:
            with self._silently():
                self.k.value, self.temperature.value = self.lab.config.top_k, 1.0
            self._follow()

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`experts`: every expert at this token and layer. `choices`: layer, token, piece, rank, expert, weight of the whole
        text. `overlap`: by layer, the share of experts that the token before had too, and chance. `losses`: what was measured.
        """
        with self._lock:
            look, measured = self.look, dict(self._nats)
        losses = pd.DataFrame(
            [(*key, value) for key, value in measured.items()], columns=["text", "k", "temperature", "nats"]
        )
        if look is None:
            columns = {
                "experts": ["expert", "logit", "score", "compared", "rank", "weight"],
                "choices": ["layer", "token", "piece", "rank", "expert", "weight"],
                "overlap": ["layer", "overlap", "chance"],
            }
            return {name: pd.DataFrame(columns=names) for name, names in columns.items()} | {"losses": losses}
        return {"experts": look.table(), "choices": _choices(look), "overlap": _overlap(look), "losses": losses}

    def code(self) -> str:
        """The settings on show as Python."""
        with self._lock:
            router = self._router()
        return (
            "import colibri_lab as cl\n\n"
            f"lab = cl.open({self.lab.name!r})\n"
            f"with lab.routing(cl.routers.{router!r}):\n"
            f"    run = lab.generate({self.text.value!r})"
        )

    def png(self, path: str | Path | None = None) -> Picture:
        """The view as a static picture with its sentences, written to `path` if given. `ColibriError` before any text."""
        with self._lock:
            look, said = self.look, self._said()
        if look is None:
            raise ColibriError("router_explorer: nothing to draw yet; give it a text, as in view.read('def f(x):')")
        picture = draw_panels(look, f"{self.lab.name} · layer {look.layer} · {router_text(look)}", said)
        if path is not None:
            picture.savefig(path)
        return picture

    # Controls

    def _make_controls(self, text: str | None) -> None:
        config = self.lab.config
        try:
            prompts = {
                f"{domain}: {t.split(chr(10))[0][:24]}": t for domain, group in texts("prompts").items() for t in group
            }
        except ColibriError:  # an installed package has no data beside it
            prompts = {}
        if text is None:
            text = next(iter(prompts.values()), "")
        start = next((name for name, each in prompts.items() if each == text), OWN_TEXT)
        most = config.num_experts // config.router.groups * config.router.top_groups
        self.prompts = W.Dropdown(
            options=[OWN_TEXT, *prompts], value=start, **labelled("example", "a prompt of one of six domains", 86)
        )
        self._prompts = prompts
        about = "the text that the model reads; leave the field to use it"
        self.text = W.Textarea(text, rows=3, continuous_update=False, **labelled("text", about, 86))
        self.token = W.IntSlider(0, 0, 0, **labelled("token", "the token to look at", 86))
        about = "the layer whose router is shown; each has its own"
        self.layer = W.SelectionSlider(options=list(config.moe_layers), **labelled("layer", about, 86))
        about = f"experts per token; the model was trained with {config.top_k}"
        self.k = W.IntSlider(config.top_k, 1, min(most, 4 * config.top_k), **labelled("k", about, 86))
        self.temperature = W.FloatLogSlider(
            1.0, base=2, min=-3, max=3, step=0.25, readout_format=".2f",
            **labelled("temperature", "the logits are divided by it: above 1 scores come closer together", 86),
        )  # fmt: skip
        buttons = {
            "As trained": (self.as_trained, "undo", "back to the model's own k and temperature"),
            "Copy settings": (self._on_copy, "copy", "this view's router as Python"),
        }
        self._tokens, self._cost = line(), line()
        self.prompts.observe(self._on_prompt, "value")
        self.text.observe(self._on_model, "value")
        for slider in (self.k, self.temperature):
            slider.observe(self._on_model, "value")
        for slider in (self.token, self.layer):
            slider.observe(self._on_place, "value")
        sliders = [self.token, self.layer, self.k, self.temperature]
        controls = [self.prompts, self.text, *sliders, self._cost, self._row(buttons)]
        self._arrange(controls, above=[self._tokens], side_px=330, left_column=1)
        self._title("Router explorer")

    def _wanted(self) -> tuple[str, int, float]:
        return self.text.value, self.k.value, round(self.temperature.value, 6)

    def _router(self) -> TopK:
        _, k, temperature = self._wanted()
        return TopK(None if k == self.lab.config.top_k else k, temperature)

    def _on_prompt(self, _) -> None:
        with self._lock:
            chosen = self._prompts.get(self.prompts.value)
            if chosen is not None and not self._quiet:
                self.text.value = chosen

    def _on_model(self, _) -> None:
        with self._lock:
            if not self._quiet:
                self._follow()

    def _on_place(self, _) -> None:
        with self._lock:
            if not self._quiet:
                self._paint()

    def _follow(self) -> None:
        """Show at once what needs no model, ask the model for the rest. The lock is held."""
        self._paint()
        wanted = self._wanted()
        if self._needs_model(wanted):
            self._enter("busy", "reading …" if self._changed(wanted) else "measuring the loss …")
            self._worker.submit(wanted)
        else:
            self._worker.stop(0)  # the lock is held: what runs is not waited for
            self._enter("ready" if self.reading else "empty", "")

    def _changed(self, wanted) -> bool:
        return self.reading is None or self.reading.text != wanted[0]

    def _needs_model(self, wanted) -> bool:
        return self._changed(wanted) or (wanted not in self._nats and len(self.reading.token_ids) > 1)

    # The model, on any thread

    def _serve(self, wanted, stale=None) -> None:
        try:
            self._work(wanted)
        except Exception as error:
            with self._lock:
                self._failed(error, None if self.reading else "")
                self._paint()

    def _work(self, wanted) -> None:
        """Read the text if it is new, measure the loss if it is not known, show both."""
        text, k, temperature = wanted
        with self._model:
            if self._changed(wanted):
                reading = read(self.lab, text)
                with self._lock:
                    self.reading = reading
                    if len(reading.nats):
                        self._nats[text, self.lab.config.top_k, 1.0] = float(reading.nats.mean())
                    with self._silently():
                        self.token.max = len(reading.token_ids) - 1
                        self.prompts.value = next(
                            (name for name, each in self._prompts.items() if each == text), OWN_TEXT
                        )
            reading = self.reading
            if wanted not in self._nats and len(reading.nats):
                with self.lab.routing(TopK(k, temperature)):
                    nats = token_nats(self.lab.logits(reading.token_ids), reading.token_ids)
                with self._lock:
                    self._nats[wanted] = float(nats.mean())
        with self._lock:
            self.error = None
            self._paint()
            if not self._needs_model(self._wanted()):
                self._enter("ready", "")

    # Showing. The lock is held.

    def _paint(self) -> None:
        with self._lock:
            k, slot = self.k.value, self.lab.slot_bytes
            layers = len(self.lab.config.moe_layers)
            self._cost.value = f"<p>{k} experts × {layers} layers: a token computes with {bytes_text(k * layers * slot)} of experts</p>"
            if self.reading is None:
                why = "no text yet: write one, or choose an example" if self.error is None else "nothing could be read"
                self._show(frames.blank(self.lab.config, why))
                return
            token = min(self.token.value, len(self.reading.token_ids) - 1)
            router, last = self._router(), self.look
            if last is not None and last.reading is self.reading and repr(last.router) == repr(router):
                self.look = last.moved(self.layer.value, token)
            else:
                self.look = frames.Look(self.reading, self.layer.value, token, router)
            self._show(frames.panels(self.look))
            self._tokens.value = token_html(self.look)
            self._say(self._said())

    def _said(self) -> list[str]:
        if self.look is None:
            return []
        key = (self.look.reading.text, *self._wanted()[1:])
        return frames.sentences(self.look, self._nats.get(key))


def router_text(look: frames.Look) -> str:
    """`k 4, temperature 1`."""
    return f"k {look.router.k or look.trained_k}, temperature {look.router.temperature:.3g}"


def token_html(look: frames.Look) -> str:
    """The text with each token coloured and numbered by its first expert in this layer; the one looked at is framed."""
    colors = expert_colors(look)
    parts = []
    first, last = token_window(look, WINDOW)
    for at in range(first, last):
        ids = look.choices[look.layer][0][at]
        color = colors.get(int(ids[0]))
        style = f"background:{_tint(color)};" if color else ""
        if at == look.token:
            style += "outline:2px solid var(--jp-ui-font-color1,#222);"
        piece = frames.visible(look.reading.pieces[at])
        tip = f"token {at}: {frames.named([int(i) for i in ids])}"
        parts.append(f'<span style="{TOKEN}{style}" title="{tip}">{html.escape(piece)}<sub>{int(ids[0])}</sub></span>')
        if "\n" in look.reading.pieces[at]:
            parts.append("<br>")
    begin, end = "… " * (first > 0), " …" * (last < len(look.reading.token_ids))
    note = f"Each token coloured and numbered by its first expert in layer {look.layer}"
    return f'<p>{note}</p><div tabindex="0" style="{BOX}">{begin}{"".join(parts)}{end}</div>'


def _tint(name: str) -> str:
    red, green, blue = (int(LIGHT[name][i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},.42)"


def _choices(look: frames.Look) -> pd.DataFrame:
    parts = []
    for layer, (ids, weights) in look.choices.items():
        token, rank = np.indices(ids.shape)
        flat = {
            "token": token.ravel(),
            "rank": rank.ravel(),
            "expert": ids.ravel().astype(int),
            "weight": weights.ravel(),
        }
        parts.append(pd.DataFrame({"layer": layer, **flat}))
    table = pd.concat(parts, ignore_index=True)
    table.insert(2, "piece", np.array(look.reading.pieces, object)[table.token])
    return table


def _overlap(look: frames.Look) -> pd.DataFrame:
    rows = []
    for layer in look.reading.layers:
        same = look.same_as_before(layer.index)
        rows.append(
            (layer.index, same.mean() if same.size else np.nan, look.choices[layer.index][0].shape[1] / layer.experts)
        )
    return pd.DataFrame(rows, columns=["layer", "overlap", "chance"])
