// The charts of a page: uPlot with 95% bands, baselines, marks, exact values, and one zoom for all of them.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const faint = (color, share) => color + Math.round(255 * share).toString(16).padStart(2, "0");
const known = (value) => typeof value === "number" && Number.isFinite(value);

// Dark blue and grey lines are too dim on a dark ground.
const ON_DARK = { "#0072B2": "#4BA3DB", "#6E6E6E": "#A8ADB4", "#009E73": "#2CC295", "#D55E00": "#FF8A3D", "#222222": "#E8E8E8" };
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

export function shown(value, percent) {
  if (!known(value)) return "–";
  return percent ? `${(100 * value).toFixed(1)}%` : String(Number(value.toPrecision(4)));
}

// A number of an axis: short, because the space is.
function tick(value, percent) {
  if (!known(value)) return "";
  if (percent) return `${Number((100 * value).toPrecision(4))}%`;
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  return size > 0 && size < 1e-3 ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(4)));
}

// Centered moving mean; the window shrinks towards both ends, so that nothing lags.
export function smoothed(values, window) {
  const half = Math.floor(window / 2);
  return values.map((_, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const part = values.slice(i - reach, i + reach + 1).filter(known);
    return part.length ? part.reduce((sum, value) => sum + value, 0) / part.length : null;
  });
}

class Chart {
  constructor(charts, spec) {
    this.charts = charts;
    this.root = element("figure", "chart");
    this.root.id = spec.id;
    const caption = element("figcaption");
    this.title = element("h3");
    this.legend = element("ul", "legend");
    caption.append(this.title, this.legend);
    this.plot = element("div", "plot");
    this.plot.tabIndex = 0;
    this.plot.dataset.go = "";
    this.plot.setAttribute("role", "img");
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.readout = element("p", "readout");
    this.root.append(caption, this.plot, this.readout);
    new ResizeObserver(() => this.resize()).observe(this.plot);
    this.show(spec);
  }

  // The same curves: new numbers only. Other curves: a new plot.
  show(spec) {
    const shape = JSON.stringify([spec.curves.map((one) => [one.key, one.label, Boolean(one.low)]), spec.title, spec.levels, spec.results]);
    this.spec = spec;
    if (shape !== this.shape || !this.u) this.build();
    else this.u.setData(this.data(), !this.charts.zoom);
    this.shape = shape;
    this.describe();
    this.read(null);
  }

  color(color) {
    return (this.charts.dark() && ON_DARK[color]) || color;
  }

  // Columns for uPlot: steps, then for each curve its values, its smoothed values, and the limits of its intervals.
  data() {
    const curves = this.spec.curves;
    const steps = [...new Set(curves.flatMap((curve) => [...curve.x, ...curve.nonfinite]))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, i) => [step, i]));
    const log = this.logarithmic();
    const column = (x, y) => {
      const filled = new Array(steps.length);
      x.forEach((step, i) => { filled[at.get(step)] = log && !(y[i] > 0) ? null : y[i]; });
      return filled;
    };
    const columns = [steps.map((step) => this.charts.place(step))];
    this.smooth = this.charts.window > 1;
    for (const curve of curves) {
      columns.push(column(curve.x, curve.y));
      if (this.smooths(curve)) columns.push(column(curve.x, smoothed(curve.y, this.charts.window)));
      if (curve.low) columns.push(column(curve.x, curve.low), column(curve.x, curve.high));
    }
    this.hidden = log ? curves.reduce((sum, curve) => sum + curve.y.filter((value) => !(value > 0)).length, 0) : 0;
    this.steps = steps;
    return columns;
  }

  // Evaluations are points with intervals; only many of them make a band.
  whiskers(curve) {
    return !curve.trained && !this.spec.stacked && curve.x.length <= 40;
  }

  smooths(curve) {
    return this.charts.window > 1 && curve.trained && curve.y.length > 4;
  }

  logarithmic() {
    return this.charts.log && !this.spec.stacked && this.spec.curves.some((curve) => curve.y.some((value) => value > 0));
  }

  build() {
    this.u?.destroy();
    const spec = this.spec;
    const series = [{}];
    const bands = [];
    const curves = spec.curves.map((curve, number) => ({ ...curve, dash: DASHES[curve.dash ?? 0], number }));
    for (const curve of curves) {
      const color = this.color(curve.color);
      const line = { stroke: color, width: 2, dash: curve.dash, spanGaps: true, points: { size: 5, fill: color } };
      // Between a few measurements nothing is known, so their line is faint, and two have none.
      if (this.whiskers(curve)) Object.assign(line, { stroke: faint(color, 0.4), width: curve.x.length > 2 ? 1 : 0, points: { show: true, size: 6, fill: color, stroke: color } });
      if (spec.stacked) Object.assign(line, { fill: color, width: 0, points: { show: false } });
      if (this.smooths(curve)) {
        // Raw values stay visible behind the mean.
        series.push({ ...line, stroke: faint(color, 0.35), width: 1, points: { show: true, size: 3, fill: faint(color, 0.5), stroke: faint(color, 0.5) } });
        series.push({ ...line, points: { show: false } });
      } else series.push(line);
      if (curve.low && this.whiskers(curve)) series.push({ show: false }, { show: false });
      else if (curve.low) {
        const edge = { stroke: faint(color, 0.5), width: 1, spanGaps: true, points: { show: false } };
        series.push(edge, edge);
        bands.push({ series: [series.length - 1, series.length - 2], fill: faint(color, 0.18) });
      }
    }
    if (spec.stacked) this.order(series);
    const axis = { stroke: style("--ink"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const log = this.logarithmic();
    const options = {
      width: Math.max(200, this.plot.clientWidth),
      height: 220,
      legend: { show: false },
      padding: [12, 12, 0, 0],
      cursor: { sync: { key: this.charts.sync, setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: (u, low, high) => this.steps_range(low, high) }, y: { distr: log ? 3 : 1, range: (u, low, high) => this.range(low, high, log) } },
      series,
      bands,
      axes: [
        { ...axis, size: 30, ...(this.charts.over ? { values: (u, values) => values.map((value) => tick(value, false)) } : {}), incrs: this.charts.over ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: 62, values: (u, values) => values.map((value) => tick(value, spec.percent)) },
      ],
      hooks: {
        draw: [(u) => this.draw(u)],
        setCursor: [(u) => this.read(u.cursor.idx)],
        setScale: [(u, key) => key === "x" && this.charts.zoomed(this, u.scales.x)],
      },
    };
    this.u = new uPlot(options, this.data(), this.plot);
  }

  // Stacked areas reach down to zero, so the highest one is drawn first.
  order(series) {
    this.reversed = true;
    series.splice(1, series.length, ...series.slice(1).reverse());
    const data = this.data.bind(this);
    if (!this.plain) {
      this.plain = data;
      this.data = () => { const [steps, ...columns] = this.plain(); return [steps, ...columns.reverse()]; };
    }
  }

  steps_range(low, high) {
    if (this.charts.zoom) return this.charts.zoom;
    // All charts have one axis, except while a range is chosen.
    const place = (step) => this.charts.place(step);
    if (this.charts.extent && low <= place(this.steps[0]) && high >= place(this.steps.at(-1))) [low, high] = this.charts.extent.map(place);
    return low === high || low === null ? [(low ?? 0) - 1, (high ?? 0) + 1] : [low, high];
  }

  range(low, high, log) {
    const values = [...this.others(), low, high].filter((value) => known(value) && (!log || value > 0));
    if (!values.length) return log ? [0.1, 1] : [0, 1];
    if (this.spec.whole && !log) return [-0.03, 1.05];
    let [least, most] = [Math.min(...values), Math.max(...values)];
    if (log) {
      // uPlot's ticks have no end unless a log axis starts at one digit, and rounding noise is no value.
      least = Math.max(least, most * 1e-9, 1e-15) / 1.3;
      const unit = 10 ** Math.floor(Math.log10(least));
      return [Number((Math.max(1, Math.floor(least / unit)) * unit).toPrecision(1)), Math.max(most, 1e-14) * 1.3];
    }
    if (this.spec.stacked) least = 0;
    // Wide bands leave the plot; curves and baselines do not. A rate has no value outside 0 and 1.
    const [lowest, highest] = this.limits(log);
    const span = highest - lowest || Math.abs(highest) || 1;
    least = Math.max(least, lowest - span, this.spec.percent ? Math.min(0, lowest) : -Infinity);
    most = Math.min(most, highest + span, this.spec.percent ? Math.max(1, highest) : Infinity);
    const room = 0.06 * (most - least || Math.abs(most) || 1);
    return [least === 0 ? 0 : least - room, most + room];
  }

  others() {
    return [...this.spec.levels, ...this.spec.results].map((one) => one.value);
  }

  // The least and the largest value of curves and baselines, without intervals.
  limits() {
    const [from, to] = this.charts.zoom ?? [-Infinity, Infinity];
    const values = this.others();
    for (const curve of this.spec.curves) curve.y.forEach((value, i) => { if (known(value) && this.charts.place(curve.x[i]) >= from && this.charts.place(curve.x[i]) <= to) values.push(value); });
    return values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [-Infinity, Infinity];
  }

  // Intervals of single points, baselines as dashed lines, and marks of messages, guards and failures at their steps.
  draw(u) {
    const context = u.ctx;
    const { left, top, width, height } = u.bbox;
    const scale = devicePixelRatio;
    context.save();
    context.font = `${11 * scale}px system-ui, sans-serif`;
    context.lineWidth = 1.2 * scale;
    context.beginPath();
    context.rect(left - 8 * scale, top - 12 * scale, width + 16 * scale, height + 12 * scale);
    context.clip();
    for (const level of this.spec.levels) {
      if (this.logarithmic() && level.value <= 0) continue;
      const y = u.valToPos(level.value, "y", true);
      context.strokeStyle = context.fillStyle = this.color(level.color);
      context.setLineDash([6 * scale, 4 * scale]);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + width, y);
      context.stroke();
    }
    context.setLineDash([]);
    for (const curve of this.spec.curves) {
      if (!curve.low || !this.whiskers(curve)) continue;
      context.strokeStyle = this.color(curve.color);
      curve.x.forEach((step, i) => this.whisker(u, step, curve.low[i], curve.high[i]));
    }
    // Squares: the final tasks, which are others than those of the curve.
    for (const result of this.spec.results) {
      context.strokeStyle = context.fillStyle = style("--ink");
      this.whisker(u, result.step, result.low, result.high);
      const [x, y] = [u.valToPos(this.charts.place(result.step), "x", true), u.valToPos(result.value, "y", true)];
      context.fillRect(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale);
    }
    for (const mark of this.charts.marks) {
      const x = u.valToPos(this.charts.place(mark.step), "x", true);
      const color = this.color(mark.kind === "message" ? "#6E6E6E" : "#D55E00");
      context.strokeStyle = faint(color, 0.6);
      context.fillStyle = color;
      context.setLineDash([2 * scale, 4 * scale]);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      context.setLineDash([]);
      context.textAlign = "center";
      context.fillText({ message: "●", guard: "▲", failure: "✕" }[mark.kind], x, top - 2 * scale);
    }
    context.restore();
  }

  whisker(u, step, low, high) {
    if (!known(low) || !known(high)) return;
    const x = u.valToPos(this.charts.place(step), "x", true);
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.valToPos(low, "y", true));
    u.ctx.lineTo(x, u.valToPos(high, "y", true));
    u.ctx.stroke();
  }

  describe() {
    const { title, unit, curves, levels, percent, results } = this.spec;
    // One measurement is a number, not a curve.
    this.root.classList.toggle("single", this.steps.length < 2);
    const known_unit = title.toLowerCase().includes(unit.toLowerCase()) || curves.some((curve) => curve.label === unit);
    this.title.replaceChildren(title, ...(known_unit ? [] : [element("span", "unit", ` ${unit}`)]));
    const items = [...curves.map((curve) => [curve.color, curve.label, curve.dash ?? 0]), ...levels.map((level) => [level.color, `${level.label}, ${shown(level.value, percent)}`, 1]), ...results.map((result) => [style("--ink"), result.label, "square"])];
    this.legend.replaceChildren(...items.map(([color, label, dash]) => {
      const item = element("li", dash === "square" ? dash : dash ? "dashed" : "", label);
      item.style.setProperty("--swatch", this.color(color));
      return item;
    }));
    this.plot.setAttribute("aria-label", `${title}, ${unit}: ${curves.map((curve) => `${curve.label} ${shown(curve.y.at(-1), percent)} at step ${curve.x.at(-1)}`).join("; ")}. Arrow keys read the values.`);
  }

  // Exact values at a step: of each curve, its nearest point.
  read(index) {
    if (!this.spec) return;
    const step = index === null || index === undefined ? Infinity : this.steps[index];
    const parts = this.spec.curves.filter((curve) => curve.x.length).map((curve) => {
      let at = curve.x.length - 1;
      for (let i = 0; i < curve.x.length; i++) if (Math.abs(curve.x[i] - step) < Math.abs(curve.x[at] - step)) at = i;
      if (step === Infinity) at = curve.x.length - 1;
      const limits = curve.low && known(curve.low[at]) ? ` [${shown(curve.low[at], this.spec.percent)}, ${shown(curve.high[at], this.spec.percent)}]` : "";
      const count = curve.n && known(curve.n[at]) ? `, n = ${curve.n[at]}` : "";
      const where = curve.x[at] === step ? "" : ` (step ${curve.x[at]})`;
      const value = curve.own ? curve.own[at] : curve.y[at];
      const part = element("span", "value", `${curve.label} ${shown(value, this.spec.percent)}${limits}${count}${where}`);
      part.style.setProperty("--swatch", this.color(curve.color));
      return part;
    });
    const marks = this.charts.marks.filter((mark) => mark.step === step).map((mark) => element("span", "bad", mark.text));
    const hidden = this.hidden ? [element("span", "note", `${this.hidden} values at or below 0 have no place on a log scale`)] : [];
    this.readout.replaceChildren(element("b", "", step === Infinity ? "last" : `step ${step}`), ...parts, ...marks, ...hidden);
  }

  key(event) {
    const u = this.u;
    const { min, max } = u.scales.x;
    const at = u.cursor.idx ?? this.steps.length - 1;
    const move = (index) => {
      const bounded = Math.min(this.steps.length - 1, Math.max(0, index));
      const step = this.steps[bounded];
      u.setCursor({ left: u.valToPos(this.charts.place(step), "x"), top: u.over.clientHeight / 2 });
      this.read(bounded);
    };
    const zoom = (factor) => {
      const middle = this.charts.place(this.steps[at]);
      this.charts.zoomTo([middle - (middle - min) * factor, middle + (max - middle) * factor]);
    };
    const keys = { ArrowLeft: () => move(at - 1), ArrowRight: () => move(at + 1), Home: () => move(0), End: () => move(this.steps.length - 1), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => this.charts.zoomTo(null), Escape: () => this.charts.zoomTo(null) };
    if (keys[event.key]) {
      keys[event.key]();
      event.preventDefault();
      event.stopPropagation();
    }
  }

  resize() {
    const width = this.plot.clientWidth;
    if (this.u && width > 0 && width !== this.u.width) this.u.setSize({ width, height: 220 });
  }
}

export class Charts {
  constructor(root, dark) {
    Object.assign(this, { root, dark, zoom: null, window: 0, log: false, over: "", axes: {}, marks: [], sync: "steps", made: new Map(), specs: [] });
    const on = (id, kind, change) => document.getElementById(id)?.addEventListener(kind, change);
    on("smoothing", "input", (event) => {
      this.window = Number(event.target.value);
      document.getElementById("window").textContent = this.window > 1 ? `${this.window} points` : "off";
      this.redraw();
    });
    on("log", "change", (event) => { this.log = event.target.checked; this.redraw(); });
    on("over", "change", (event) => { this.over = event.target.value; this.zoom = null; this.redraw(); this.zoomTo(null); });
    on("only", "input", () => this.filter());
    on("all", "click", () => this.zoomTo(null));
    this.load();
  }

  // One request at a time, and rests as long as ten of them took, so that a long run does not keep the machine busy.
  async load() {
    if (this.busy) { this.again = true; return; }
    this.busy = true;
    const start = performance.now();
    try {
      const answer = await fetch(this.root.dataset.charts);
      if (answer.ok) this.show(await answer.json());
      else this.root.replaceChildren(element("p", "bad", await answer.text().then((text) => new DOMParser().parseFromString(text, "text/html").querySelector("main .bad")?.textContent ?? text)));
    } catch { /* the server has ended; the page says that it is not live */ }
    await new Promise((resolve) => setTimeout(resolve, Math.min(20000, 10 * (performance.now() - start))));
    this.busy = false;
    if (this.again) { this.again = false; this.load(); }
  }

  // Where a step is on the x axis: the number itself, or what was spent until then.
  place(step) {
    if (!this.over) return step;
    const [steps, spent] = this.axes[this.over];
    if (step <= 0 || step >= steps.at(-1)) return step <= 0 ? 0 : spent.at(-1);
    const after = steps.findIndex((one) => one >= step);
    const [from, start] = after ? [steps[after - 1], spent[after - 1]] : [0, 0];
    return start + ((spent[after] - start) * (step - from)) / (steps[after] - from);
  }

  show({ charts, marks, axes }) {
    Object.assign(this, { marks, axes });
    const over = document.getElementById("over");
    for (const name of Object.keys(axes)) if (![...over.options].some((one) => one.value === name)) over.append(new Option(name, name));
    const steps = charts.flatMap((spec) => spec.curves.flatMap((curve) => [curve.x[0], curve.x.at(-1), ...curve.nonfinite])).filter(known);
    this.extent = steps.length ? [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))] : null;
    const seen = new Set();
    let section = null;
    for (const spec of charts) {
      const key = `${spec.section} ${spec.title}`;
      seen.add(key);
      if (section?.dataset.name !== spec.section) section = this.section(spec.section);
      const chart = this.made.get(key);
      if (chart) chart.show(spec);
      else {
        const made = new Chart(this, spec);
        this.made.set(key, made);
        section.lastElementChild.append(made.root);
        made.resize();
      }
    }
    for (const [key, chart] of this.made) if (!seen.has(key)) { chart.root.remove(); this.made.delete(key); }
    if (!charts.length && !this.root.children.length) this.root.append(element("p", "note waiting", this.root.dataset.ended === undefined ? "Curves appear after the first step." : "This run has no curves."));
    else if (charts.length) this.root.querySelector(".waiting")?.remove();
    const list = document.getElementById("marks");
    if (list) document.getElementById("count").textContent = marks.length ? `${marks.length}, the last at step ${marks.at(-1).step}` : "none";
    list?.replaceChildren(...marks.map((mark) => {
      const item = element("li", mark.kind === "message" ? "" : "bad");
      item.append(element("b", "", `step ${mark.step} `), mark.text);
      return item;
    }));
    this.filter();
    this.root.dataset.ready = "yes";
  }

  section(name) {
    const found = [...this.root.children].find((one) => one.dataset.name === name);
    if (found) return found;
    const folded = name === "Other metrics";
    const made = element(folded ? "details" : "section", "charts");
    made.dataset.name = name;
    const heading = element(folded ? "summary" : "h2", "", name);
    made.append(heading, element("div", "grid"));
    this.root.append(made);
    return made;
  }

  // Charts whose text has the words; folded sections open while words are given.
  filter() {
    const words = (document.getElementById("only")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const section of this.root.children) {
      const figures = [...section.querySelectorAll(".chart")];
      for (const figure of figures) {
        const text = `${section.dataset.name} ${figure.querySelector("figcaption").textContent}`.toLowerCase();
        figure.hidden = !words.every((word) => text.includes(word));
      }
      const count = figures.filter((figure) => !figure.hidden).length;
      section.hidden = figures.length > 0 && count === 0;
      section.style.setProperty("--count", Math.max(1, count));
      if (section.matches("details") && words.length && !section.open) section.open = section.dataset.opened = true;
      else if (!words.length && section.dataset.opened) { section.open = false; delete section.dataset.opened; }
    }
  }

  redraw() {
    for (const chart of this.made.values()) { chart.u?.destroy(); chart.u = null; chart.show(chart.spec); }
  }

  zoomed(source, scale) {
    if (this.zooming || !known(scale.min)) return;
    const all = (this.extent ?? [source.steps[0], source.steps.at(-1)]).map((step) => this.place(step));
    const next = scale.min <= all[0] && scale.max >= all[1] ? null : [scale.min, scale.max];
    if (JSON.stringify(next) !== JSON.stringify(this.zoom)) this.zoomTo(next);
  }

  zoomTo(range) {
    this.zoom = range;
    const all = document.getElementById("all");
    all.disabled = !range;
    all.textContent = range ? `Show all, not ${tick(range[0])} to ${tick(range[1])}` : "Show all";
    this.zooming = true;
    for (const chart of this.made.values()) {
      const [low, high] = range ?? (this.extent ?? [chart.steps[0], chart.steps.at(-1)]).map((step) => this.place(step));
      chart.u?.setScale("x", { min: low, max: high });
    }
    this.zooming = false;
  }
}
