// One panel of the live view. The model holds two traits: `spec` (labels, axes, colours as [on light, on dark]) and
// `data` (float32, shape in spec.shape). Drawing depends on nothing else, so a view shown again shows the same picture.

const FONT = "12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const BOLD = "bold " + FONT;

function isDark() {
  const flag = document.body.dataset.jpThemeLight;
  if (flag !== undefined) return flag === "false";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function ticks(lo, hi, want) {
  const raw = (hi - lo) / Math.max(want, 1);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
  const out = [];
  for (let v = Math.ceil(lo / step) * step; v <= hi + step * 1e-6; v += step) out.push(+v.toPrecision(6));
  return out;
}

// 1, 2 and 5 times each power of ten between two exponents, as [exponent, its name]; only powers where those are too many.
function logTicks(lo, hi, want) {
  const out = [];
  for (let k = Math.floor(lo); k <= hi; k++) for (const m of hi - lo > want / 3 ? [1] : [1, 2, 5]) {
    const v = k + Math.log10(m);
    if (v >= lo - 1e-9 && v <= hi + 1e-9) out.push([v, String(+(m * 10 ** k).toPrecision(3))]);
  }
  return out;
}

function axes(g, box, spec, ink, rule, { xTicks = true, yTicks = true } = {}) {
  const [x0, x1] = spec.xlim, [y0, y1] = spec.ylim;
  const px = (v) => box.x + ((v - x0) / (x1 - x0 || 1)) * box.w;
  const py = (v) => box.y + box.h - ((v - y0) / (y1 - y0 || 1)) * box.h;
  g.font = FONT;
  g.lineWidth = 1;
  g.textBaseline = "middle";
  if (yTicks) {
    g.textAlign = "right";
    for (const [v, name] of spec.log ? logTicks(y0, y1, box.h / 20) : ticks(y0, y1, box.h / 40).map((v) => [v, String(v)])) {
      g.strokeStyle = rule;
      g.beginPath(); g.moveTo(box.x, py(v)); g.lineTo(box.x + box.w, py(v)); g.stroke();
      g.fillStyle = ink; g.fillText(name, box.x - 6, py(v));
    }
    g.save();
    g.translate(11, box.y + box.h / 2); g.rotate(-Math.PI / 2);
    g.textAlign = "center"; g.fillText(spec.ylabel, 0, 0);
    g.restore();
  }
  if (xTicks) {
    g.textAlign = "center"; g.fillStyle = ink;
    const whole = () => ticks(x0, x1, box.w / 55).filter(Number.isInteger).map((v) => [v, String(v)]);
    for (const [v, name] of spec.log ? logTicks(x0, x1, box.w / 40) : whole()) g.fillText(name, px(v), box.y + box.h + 11);
    g.fillText(spec.xlabel, box.x + box.w / 2, box.y + box.h + 27);
  }
  return { px, py };
}

function cursorLine(g, spec, box, px, ink) {
  if (spec.cursor === null || spec.cursor === undefined) return;
  g.strokeStyle = ink; g.lineWidth = 1; g.setLineDash([2, 3]);
  g.beginPath(); g.moveTo(px(spec.cursor), box.y); g.lineTo(px(spec.cursor), box.y + box.h); g.stroke();
  g.setLineDash([]);
}

// Where each name of the legend goes: side by side while there is room, else on a new row.
function legend(g, series, width) {
  g.font = FONT;
  let x = 0, row = 0;
  const places = series.map((s) => {
    const w = 46 + g.measureText(s.label).width;
    if (x && x + w > width) { x = 0; row += 1; }
    x += w;
    return { s, x: x - w, row };
  });
  return { places, rows: Math.max(row + 1, 1) };
}

// Lines with their legend above the axes.
function lines(g, W, H, spec, at, ui) {
  const { places, rows } = legend(g, spec.series.filter((s) => s.label), W - 46);
  const box = { x: 46, y: 30 + 16 * rows, w: W - 58 };
  box.h = H - box.y - 38;
  for (const { s, x, row } of places) {
    const left = box.x + x, y = 32 + 16 * row;
    g.strokeStyle = s.color[ui.dark]; g.lineWidth = s.width; g.setLineDash(s.dash);
    g.beginPath(); g.moveTo(left, y); g.lineTo(left + 26, y); g.stroke(); g.setLineDash([]);
    g.fillStyle = ui.ink; g.textAlign = "left"; g.textBaseline = "middle"; g.font = FONT;
    g.fillText(s.label, left + 32, y);
  }
  const { px, py } = axes(g, box, spec, ui.ink, ui.rule);
  g.save();
  g.beginPath(); g.rect(box.x, box.y - 2, box.w, box.h + 4); g.clip();
  const n = spec.shape[1], where = (k) => px(spec.x.length ? spec.x[k] : k * spec.stride);
  spec.series.forEach((s, i) => {
    g.strokeStyle = s.color[ui.dark]; g.lineWidth = s.width; g.globalAlpha = s.alpha; g.setLineDash(s.dash);
    g.beginPath();
    let down = false;
    for (let k = 0; k < n; k++) {
      const v = at(i * n + k);
      if (Number.isNaN(v)) { down = false; continue; }
      if (down) g.lineTo(where(k), py(v)); else g.moveTo(where(k), py(v));
      down = true;
    }
    g.stroke();
  });
  g.restore();
  cursorLine(g, spec, box, px, ui.ink);
  for (const draw of [markName, mark]) for (const m of spec.marks) draw(g, m, box, px, py, ui);  // no name covers a point
}

// A point, or a dotted upright where y is null.
function mark(g, m, box, px, py, ui) {
  const x = px(m.x), y = m.y === null ? 0 : py(m.y), color = m.color[ui.dark];
  g.strokeStyle = g.fillStyle = color; g.lineWidth = 1.2;
  g.beginPath();
  if (m.y === null) {
    g.setLineDash([2, 3]); g.moveTo(x, box.y); g.lineTo(x, box.y + box.h); g.stroke(); g.setLineDash([]);
  } else if (m.shape === "star") {
    for (let i = 0; i < 10; i++) {
      const r = i % 2 ? 3.2 : 8, a = (Math.PI * i) / 5 - Math.PI / 2;
      g.lineTo(x + r * Math.cos(a), y + r * Math.sin(a));
    }
    g.closePath(); g.fill();
  } else if (m.shape === "ring") {
    g.lineWidth = 2; g.arc(x, y, 9, 0, 2 * Math.PI); g.stroke();
  } else {
    g.arc(x, y, m.text ? 4.5 : 2.5, 0, 2 * Math.PI); g.fill();
  }
}

// Its text, on the side with room.
function markName(g, m, box, px, py, ui) {
  if (!m.text) return;
  const x = px(m.x);
  let y = m.y === null ? box.y + 8 : py(m.y);
  g.font = FONT; g.textBaseline = "middle"; g.lineWidth = 3;
  const right = x + 10 + g.measureText(m.text).width < box.x + box.w;
  g.textAlign = right ? "left" : "right";
  if (m.y !== null) y = Math.min(y + (m.above ? -11 : 11), box.y + box.h - 6);
  g.strokeStyle = ui.paper; g.strokeText(m.text, x + (right ? 8 : -8), y);
  g.fillStyle = m.y === null ? ui.ink : m.color[ui.dark]; g.fillText(m.text, x + (right ? 8 : -8), y);
}

// Stacked areas; a band thick enough carries its name.
function stack(g, W, H, spec, at, ui) {
  const box = { x: 46, y: 26, w: W - 58 };
  box.h = H - box.y - 38;
  const { px, py } = axes(g, box, spec, ui.ink, ui.rule);
  const [m, n] = spec.shape;
  g.save();
  g.beginPath(); g.rect(box.x, box.y, box.w, box.h); g.clip();
  const base = new Float64Array(n);
  const names = [];
  for (let i = 0; i < m && n; i++) {
    g.fillStyle = spec.series[i].color[ui.dark];
    g.beginPath();
    for (let k = 0; k < n; k++) g.lineTo(px(k * spec.stride), py(base[k]));
    if (n === 1) g.lineTo(px(0) + 3, py(base[0]));
    if (n === 1) g.lineTo(px(0) + 3, py(base[0] + at(i)));
    let low = -Infinity, high = Infinity;  // the free strip of the band over the width of its name
    const reach = Math.ceil(((130 / box.w) * (spec.xlim[1] - spec.xlim[0])) / spec.stride);
    for (let k = n - 1; k >= 0; k--) {
      const top = base[k] + at(i * n + k);
      g.lineTo(px(k * spec.stride), py(top));
      if (k < reach) { low = Math.max(low, base[k]); high = Math.min(high, top); }
      base[k] = top;
    }
    g.closePath(); g.fill();
    if (n >= reach && py(low) - py(high) > 15) names.push([spec.series[i].label, (py(low) + py(high)) / 2]);
  }
  g.font = FONT; g.textAlign = "left"; g.textBaseline = "middle"; g.lineWidth = 3;
  for (const [name, y] of names) {
    g.strokeStyle = ui.paper; g.strokeText(name, box.x + 8, y);
    g.fillStyle = ui.ink; g.fillText(name, box.x + 8, y);
  }
  g.restore();
  cursorLine(g, spec, box, px, ui.ink);
}

// Horizontal bars, in the order of the stack from the top down; the kept run is a tick.
function bars(g, W, H, spec, at, ui) {
  const m = spec.shape[0];
  g.font = FONT;
  const names = Math.max(...spec.series.map((s) => g.measureText(s.label).width)) + 12;
  const narrow = W < 290, left = Math.min(Math.max(names, 60), 0.5 * W);
  const texts = spec.series.map((_, i) => (spec.texts[i] || "")).map((text) => (narrow ? text.split(" · ")[0] : text));  // "41 % · 2.1 ms"
  const room = Math.max(narrow ? 38 : 86, ...texts.map((text) => g.measureText(text).width + 10));
  const box = { x: left, y: 26, w: W - left - room };
  box.h = H - box.y - 38;
  const { px } = axes(g, box, spec, ui.ink, ui.rule, { yTicks: false });
  const step = box.h / m;
  g.font = FONT; g.textBaseline = "middle";
  for (let i = 0; i < m; i++) {
    const row = m - 1 - i, y = box.y + row * step, v = at(2 * i), kept = at(2 * i + 1);
    g.fillStyle = ui.ink; g.textAlign = "right"; g.fillText(spec.series[i].label, box.x - 7, y + step / 2);
    const w = Number.isNaN(v) ? 0 : px(v) - box.x;
    g.fillStyle = spec.series[i].color[ui.dark]; g.fillRect(box.x, y + 2, w, step - 4);
    let right = w;
    if (!Number.isNaN(kept)) {
      g.strokeStyle = ui.ink; g.lineWidth = 2;
      g.beginPath(); g.moveTo(px(kept), y + 1); g.lineTo(px(kept), y + step - 1); g.stroke();
      right = Math.max(w, px(kept) - box.x);
    }
    g.fillStyle = ui.ink; g.textAlign = "left";
    g.fillText(texts[i], box.x + right + 5, y + step / 2);
  }
  g.strokeStyle = ui.ink; g.lineWidth = 1;
  g.beginPath(); g.moveTo(box.x, box.y); g.lineTo(box.x, box.y + box.h); g.stroke();
}

// One column per expert, over a line at zero: its series gives the colour, its text stands above it, a tick marks a second
// value. Series without a name in the legend are the ordinary columns.
function columns(g, W, H, spec, at, ui) {
  const n = spec.shape[1], box = { x: 46, y: 46, w: W - 58 };
  box.h = H - box.y - 38;
  let x = box.x;
  g.font = FONT; g.textBaseline = "middle"; g.textAlign = "left";
  for (const s of spec.series.filter((s) => s.label)) {
    g.fillStyle = s.color[ui.dark];
    if (s.dash.length) g.fillRect(x, 31, 12, 3); else g.fillRect(x, 27, 10, 10);
    g.fillStyle = ui.ink; g.fillText(s.label, x + 15, 32);
    x += g.measureText(s.label).width + 26;
  }
  const { px, py } = axes(g, box, spec, ui.ink, ui.rule);
  g.save();
  g.beginPath(); g.rect(box.x, box.y - 14, box.w, box.h + 16); g.clip();
  const step = box.w / n, zero = py(Math.max(0, spec.ylim[0]));
  for (let i = 0; i < n; i++) {
    const v = at(i), tick = at(2 * n + i), left = px(i) - step / 2, top = Math.min(py(v), zero);
    g.fillStyle = spec.series[at(n + i)].color[ui.dark];
    g.fillRect(left + 0.1 * step, top, 0.8 * step, Math.max(Math.abs(py(v) - zero), v ? 1 : 0));
    if (!Number.isNaN(tick)) {
      g.fillStyle = ui.ink; g.fillRect(left, py(tick) - 1, step, 2);
    }
    if (spec.texts[i]) {
      g.fillStyle = ui.ink; g.textAlign = "center";
      g.fillText(spec.texts[i], px(i), Math.min(top, Number.isNaN(tick) ? top : py(tick)) - 7);
    }
  }
  if (spec.level !== null && spec.level !== undefined) {
    g.strokeStyle = ui.ink; g.lineWidth = 1; g.setLineDash([2, 3]);
    g.beginPath(); g.moveTo(box.x, py(spec.level)); g.lineTo(box.x + box.w, py(spec.level)); g.stroke();
    g.setLineDash([]);
  }
  g.restore();
}

// Where each name of a grid's states goes: in one row, if need be by its first word, else in several.
function swatches(g, W, left, series) {
  g.font = FONT;
  const wide = (name) => g.measureText(name).width + 24, sum = (names) => names.reduce((w, name) => w + wide(name), 0);
  let names = series.map((s) => s.label);
  if (sum(names) > W - 8) names = names.map((name) => name.split(/[ ,]/)[0]);
  const start = Math.max(8, Math.min(left, W - sum(names)));
  let x = start, row = 0;
  const places = names.map((name) => {
    if (x > start && x + wide(name) - 8 > W) { x = start; row += 1; }
    x += wide(name);
    return { name, x: x - wide(name), row };
  });
  return { places, rows: row + 1 };
}

function gridBox(g, W, H, spec) {
  g.font = FONT;
  const x = Math.max(40, 24 + Math.max(0, ...spec.rows.map((name) => g.measureText(name).width)));
  const legend = swatches(g, W, x, spec.series), box = { x, y: 26 + 16 * legend.rows, w: W - x - 8 };
  box.h = H - box.y - 38;
  return { ...box, cw: box.w / spec.shape[2], ch: box.h / spec.shape[1], places: legend.places };
}

// Layers × experts: 0 absent, 1 resident, 2 used now, 3 missed (also a cross).
function grid(g, W, H, spec, at, ui, cell) {
  const [, L, E] = spec.shape, box = gridBox(g, W, H, spec);
  const colors = [ui.absent, ...spec.series.map((s) => s.color[ui.dark])];
  g.font = FONT; g.textBaseline = "middle"; g.textAlign = "left";
  box.places.forEach(({ name, x, row }, i) => {
    const y = 27 + 16 * row;
    g.fillStyle = colors[i + 1]; g.fillRect(x, y, 10, 10);
    if (i === 2) cross(g, x, y, 10, 10, ui);
    g.fillStyle = ui.ink; g.fillText(name, x + 14, y + 5);
  });
  for (let l = 0; l < L; l++) for (let e = 0; e < E; e++) {
    const state = at(l * E + e), cx = box.x + e * box.cw, cy = box.y + l * box.ch;
    g.fillStyle = colors[state] || ui.absent;
    g.fillRect(cx, cy, box.cw - 0.8, box.ch - 0.8);
    if (state === 3) cross(g, cx, cy, box.cw - 0.8, box.ch - 0.8, ui);
  }
  if (cell) {
    g.strokeStyle = ui.ink; g.lineWidth = 2;
    g.strokeRect(box.x + cell[1] * box.cw - 1, box.y + cell[0] * box.ch - 1, box.cw + 1, box.ch + 1);
  }
  g.fillStyle = ui.ink; g.textAlign = "right";
  const every = Math.ceil(12 / box.ch);  // rows lower than their names are named now and then
  spec.rows.forEach((name, l) => { if (l % every === 0) g.fillText(name, box.x - 5, box.y + (l + 0.5) * box.ch); });
  g.save(); g.translate(9, box.y + box.h / 2); g.rotate(-Math.PI / 2);
  g.textAlign = "center"; g.fillText(spec.ylabel, 0, 0); g.restore();
  g.textAlign = "center";
  for (const e of ticks(0, E - 1, box.w / 55)) g.fillText(String(e), box.x + (e + 0.5) * box.cw, box.y + box.h + 11);
  g.fillText(spec.xlabel, box.x + box.w / 2, box.y + box.h + 27);
}

function cross(g, x, y, w, h, ui) {
  const r = Math.min(w, h) * 0.32, cx = x + w / 2, cy = y + h / 2;
  g.strokeStyle = ui.paper; g.lineWidth = 1.4;
  g.beginPath();
  g.moveTo(cx - r, cy - r); g.lineTo(cx + r, cy + r); g.moveTo(cx - r, cy + r); g.lineTo(cx + r, cy - r);
  g.stroke();
}

function about(spec, at, [l, e]) {
  const [, L, E] = spec.shape, k = l * E + e;
  if (spec.words.length) {
    const weight = at(L * E + k);
    return `layer ${spec.rows[l]}, expert ${e}: ${spec.words[at(k)]}${Number.isNaN(weight) ? "" : `, weight ${weight.toFixed(3)}`}`;
  }
  const state = ["not in memory", "resident", "used by this token", "missed: read for this token"][at(k)];
  const since = at(L * E + k), uses = at(2 * L * E + k);
  const held = Number.isNaN(since) ? "" : since < 0 ? ", from the start" : `, since step ${since}`;
  return `layer ${spec.rows[l]}, expert ${e}: ${state}${held}, used by ${uses} step${uses === 1 ? "" : "s"} so far`;
}

const KINDS = { lines, stack, bars, columns, grid };

function render({ model, el }) {
  const height = model.get("height");
  const canvas = document.createElement("canvas");
  Object.assign(canvas.style, { width: "100%", height: height + "px", display: "block" });
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const readout = document.createElement("div");
  readout.setAttribute("aria-live", "polite");
  Object.assign(readout.style, { font: FONT, lineHeight: "16px", minHeight: "32px", color: "var(--jp-ui-font-color1, inherit)" });
  el.style.width = "100%";
  el.appendChild(canvas);
  let cell = null, wanted = 0, blind = 0;

  function numbers() {
    const view = model.get("data");
    const bytes = view && view.byteLength ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : new ArrayBuffer(0);
    const values = new Float32Array(bytes);
    return (i) => values[i];
  }

  function draw() {
    wanted = 0;
    const spec = model.get("spec"), W = canvas.clientWidth, H = height;
    if (!spec || !spec.kind) return;
    if (!W) {  // no layout at this moment (a theme being swapped, a hidden tab): look again a few times
      if (blind++ < 20) setTimeout(redraw, 100);
      return;
    }
    blind = 0;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(W * ratio)) { canvas.width = Math.round(W * ratio); canvas.height = Math.round(H * ratio); }
    const g = canvas.getContext("2d"), dark = isDark() ? 1 : 0, colors = model.get("colors");
    const ui = { dark };
    for (const name of ["ink", "rule", "absent"]) ui[name] = colors[name][dark];
    ui.paper = dark ? "#111111" : "#FFFFFF";
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, W, H);
    g.fillStyle = ui.ink; g.font = BOLD; g.textAlign = "left"; g.textBaseline = "middle";
    g.fillText(spec.title, 8, 11);
    const titleEnd = 8 + g.measureText(spec.title).width;
    g.font = FONT;
    if (spec.note && titleEnd + g.measureText(spec.note).width + 22 < W) {
      g.textAlign = "right"; g.fillText(spec.note, W - 6, 11);
    }
    KINDS[spec.kind](g, W, H, spec, numbers(), ui, cell);
    if (spec.empty) {
      g.font = FONT; g.textAlign = "center"; g.fillStyle = ui.ink;
      g.fillText(spec.empty, W / 2 + 16, H / 2);
    }
    canvas.setAttribute("aria-label", [spec.title, spec.note, ...spec.series.map((s, i) => `${s.label} ${spec.texts[i] || ""}`), spec.empty]
      .filter((s) => s && s.trim()).join("; "));
    if (spec.kind === "grid") {
      readout.textContent = cell ? about(spec, numbers(), cell) : spec.empty ? "" : "point at a cell, or use the arrow keys";
    }
  }
  const redraw = () => { if (!wanted) wanted = requestAnimationFrame(draw); };

  function move(event) {
    const spec = model.get("spec"), [, L, E] = spec.shape;
    if (event.type === "keydown") {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!by) return;
      const [l, e] = cell || [0, -by[1]];
      cell = [Math.min(L - 1, Math.max(0, l + by[0])), Math.min(E - 1, Math.max(0, e + by[1]))];
      event.preventDefault(); event.stopPropagation();
    } else {
      const r = canvas.getBoundingClientRect(), box = gridBox(canvas.getContext("2d"), canvas.clientWidth, height, spec);
      const l = Math.floor((event.clientY - r.top - box.y) / box.ch), e = Math.floor((event.clientX - r.left - box.x) / box.cw);
      cell = l >= 0 && l < L && e >= 0 && e < E ? [l, e] : null;
    }
    redraw();
  }
  if ((model.get("spec") || {}).kind === "grid") {
    el.appendChild(readout);
    canvas.addEventListener("mousemove", move);
    canvas.addEventListener("mouseleave", move);
    canvas.addEventListener("keydown", move);
  }

  model.on("change:data", redraw);
  model.on("change:spec", redraw);
  const resized = new ResizeObserver(redraw);
  resized.observe(canvas);
  const themed = new MutationObserver(redraw);
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", redraw);
  redraw();
  return () => {
    model.off("change:data", redraw);
    model.off("change:spec", redraw);
    resized.disconnect();
    themed.disconnect();
    media.removeEventListener("change", redraw);
  };
}

// Text sent by "copy settings" goes to the clipboard where the browser allows it; the view shows it in any case.
function initialize({ model }) {
  const copy = (message) => { if (message && message.copy) navigator.clipboard?.writeText(message.copy).catch(() => {}); };
  model.on("msg:custom", copy);
  return () => model.off("msg:custom", copy);
}

export default { initialize, render };
