// Curves on a canvas. The charts of a training share one zoom along its steps; all share one
// smoothing.

const MARGIN = { left: 52, right: 10, top: 8, bottom: 20 };

class View {
  constructor() {
    this.ranges = new Map(); // [first, last] step that is shown, by training; without one all
    this.smoothing = 0;
    this.logarithmic = false;
    this.charts = new Set();
  }
  change(changes) {
    Object.assign(this, changes);
    for (const chart of this.charts) chart.draw();
  }
  zoom(training, range) {
    this.ranges.set(training, range);
    this.change({});
  }
  whole() {
    this.ranges.clear();
    this.change({});
  }
  forget() {
    for (const chart of this.charts) chart.watcher.disconnect();
    this.charts.clear();
  }
}

// Exponential moving mean, without the pull of its first value.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Round numbers between two ends, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9 && found.length < 50; i++) {
    found.push(i * step);
  }
  return found;
}

// The index of the step nearest to `step`; steps increase.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

class Chart {
  // series: [{name, colour, steps, values, sparse, skip}], where a `sparse` one has points and is not
  // smoothed, and the scale does not count the steps in `skip`; marks: [{step, colour, text}];
  // notes: what stands under the title.
  constructor(view, title, series, marks = [], notes = []) {
    Object.assign(this, { view, title, series, marks, pointer: null, drag: null, seen: false });
    this.training = title.includes(": ") ? title.split(": ")[0] : "";
    this.canvas = element("canvas", { role: "img", "aria-label": title });
    this.readout = element("div", { class: "readout" });
    this.node = element("section", { class: "chart" },
      element("h3", {}, title), ...notes, this.canvas, this.readout);
    this.listen();
    this.watcher = new IntersectionObserver((entries) => {
      this.seen = entries.some((entry) => entry.isIntersecting);
      this.draw();
    });
    this.watcher.observe(this.canvas);
    view.charts.add(this);
  }

  listen() {
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    const events = {
      mousemove: (event) => { this.pointer = at(event); this.draw(); },
      mouseleave: () => { this.pointer = this.drag = null; this.draw(); },
      mousedown: (event) => { this.drag = at(event); },
      mouseup: (event) => this.zoom(at(event)),
      dblclick: () => this.view.whole(),
    };
    for (const [name, listener] of Object.entries(events)) {
      this.canvas.addEventListener(name, listener);
    }
  }

  zoom(x) {
    const from = this.drag;
    this.drag = null;
    if (from === null || Math.abs(x - from) < 5) return;
    const ends = [this.stepAt(Math.min(from, x)), this.stepAt(Math.max(from, x))];
    if (ends[1] - ends[0] >= 1) this.view.zoom(this.training, ends);
  }

  stepAt(x) {
    return this.x0 + (x - MARGIN.left) / this.wide * (this.x1 - this.x0);
  }

  // The lines to draw: [{colour, steps, values, faint}].
  lines() {
    const weight = this.view.smoothing;
    if (!weight) return this.series;
    return this.series.flatMap((one) => (one.sparse ? [one]
      : [{ ...one, faint: true }, { ...one, values: smoothed(one.values, weight) }]));
  }

  measure(lines) {
    const box = this.canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(box.width * scale);
    this.canvas.height = Math.round(box.height * scale);
    this.wide = box.width - MARGIN.left - MARGIN.right;
    this.high = box.height - MARGIN.top - MARGIN.bottom;
    const steps = this.series.flatMap((one) => [one.steps[0], one.steps.at(-1)]);
    [this.x0, this.x1] = this.view.ranges.get(this.training) || [Math.min(...steps), Math.max(...steps)];
    if (this.x0 === this.x1) { this.x0 -= 0.5; this.x1 += 0.5; }
    this.bound(lines);
    return scale;
  }

  // The lowest and the highest value that is shown, perhaps without the steps to skip.
  ends(lines, skipping) {
    let low = Infinity, high = -Infinity;
    for (const { steps, values, skip } of lines) {
      for (let i = 0; i < steps.length; i++) {
        const shown = steps[i] >= this.x0 && steps[i] <= this.x1;
        if (!shown || (this.view.logarithmic && values[i] <= 0)) continue;
        if (skipping && skip && skip.has(steps[i])) continue;
        if (values[i] < low) low = values[i];
        if (values[i] > high) high = values[i];
      }
    }
    return [low, high];
  }

  bound(lines) {
    let [low, high] = this.ends(lines, true);
    if (low >= high) [low, high] = this.ends(lines, false);  // only such steps, or one value else
    this.empty = low > high;
    this.log = this.view.logarithmic && high > 0;
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    [this.y0, this.y1] = [low - pad, high + pad];
  }

  px(step) { return MARGIN.left + (step - this.x0) / (this.x1 - this.x0) * this.wide; }
  py(value) {
    const y = this.log ? Math.log10(value) : value;
    return MARGIN.top + (1 - (y - this.y0) / (this.y1 - this.y0)) * this.high;
  }

  draw() {
    if (!this.seen || !this.canvas.isConnected) return;
    const lines = this.lines(), scale = this.measure(lines), pen = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    this.colours = { soft: style.getPropertyValue("--soft"), line: style.getPropertyValue("--line") };
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    if (this.empty) { this.readout.textContent = "no value here"; return; }
    this.axes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, 0, this.wide, this.high + MARGIN.top + 1);
    pen.clip();
    this.paint(pen, lines);
    this.beyond(pen, lines);
    this.alarms(pen);
    this.selection(pen);
    pen.restore();
    this.read(pen);
  }

  axes(pen) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this.colours.soft;
    pen.strokeStyle = this.colours.line;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of ticks(this.y0, this.y1, 4)) {
      const value = this.log ? 10 ** tick : tick, y = Math.round(this.py(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(MARGIN.left + this.wide, y);
      pen.stroke();
      pen.fillText(axisNumber(value), MARGIN.left - 5, y + 3.5);
    }
    pen.textAlign = "center";
    for (const tick of ticks(this.x0, this.x1, 5)) {
      if (Number.isInteger(tick)) pen.fillText(String(tick), this.px(tick), MARGIN.top + this.high + 15);
    }
  }

  paint(pen, lines) {
    for (const { steps, values, colour, faint, sparse } of lines) {
      pen.strokeStyle = pen.fillStyle = colour;
      pen.globalAlpha = faint ? 0.25 : 1;
      pen.lineWidth = 1.6;
      pen.beginPath();
      for (let i = 0; i < steps.length; i++) {
        if (!(this.log && values[i] <= 0)) pen.lineTo(this.px(steps[i]), this.py(values[i]));
      }
      pen.stroke();
      if (sparse) steps.forEach((_, i) => this.point(pen, { steps, values, colour }, i, 2.5));
    }
    pen.globalAlpha = 1;
  }

  // Says what lies outside of the scale: a step that compiled takes many times as long.
  beyond(pen, lines) {
    pen.fillStyle = this.colours.soft;
    pen.textAlign = "left";
    for (const { steps, values, skip } of lines) {
      const i = skip ? steps.findIndex((step) => skip.has(step) && step >= this.x0) : -1;
      if (i < 0 || steps[i] > this.x1) continue;
      const y = this.py(values[i]);
      if (y >= 0 && y <= MARGIN.top + this.high) continue;
      const at = y < 0 ? MARGIN.top + 10 : MARGIN.top + this.high - 5;
      pen.fillText(`${y < 0 ? "▲" : "▼"} ${number(values[i])} in step ${steps[i]}`, this.px(steps[i]) + 8, at);
      return;
    }
  }

  alarms(pen) {
    pen.setLineDash([3, 3]);
    for (const { step, colour } of this.marks) {
      pen.strokeStyle = colour;
      pen.beginPath();
      pen.moveTo(this.px(step), 0);
      pen.lineTo(this.px(step), MARGIN.top + this.high);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  selection(pen) {
    if (this.drag === null || this.pointer === null) return;
    pen.globalAlpha = 0.15;
    pen.fillStyle = this.colours.soft;
    pen.fillRect(this.drag, MARGIN.top, this.pointer - this.drag, this.high);
    pen.globalAlpha = 1;
  }

  // The values under the pointer, or the last ones.
  read(pen) {
    const inside = this.pointer !== null && this.pointer >= MARGIN.left;
    const step = inside ? this.stepAt(this.pointer) : Infinity;
    const parts = [];
    for (const one of this.series) {
      const i = inside ? nearest(one.steps, step) : one.steps.length - 1;
      parts.push(element("span", { class: "value" }, dot(one.colour),
        `${one.name} ${number(one.values[i])} (step ${one.steps[i]})`), " ");
      if (inside) this.point(pen, one, i, 3.5);
    }
    for (const mark of inside ? this.marks : []) {
      if (Math.abs(this.px(mark.step) - this.pointer) < 4) parts.push(mark.text);
    }
    this.readout.replaceChildren(...parts);
  }

  point(pen, { steps, values, colour }, i, radius) {
    if (this.log && values[i] <= 0) return;
    pen.fillStyle = colour;
    pen.beginPath();
    pen.arc(this.px(steps[i]), this.py(values[i]), radius, 0, 7);
    pen.fill();
  }
}

function axisNumber(value) {
  const size = Math.abs(value);
  if (size && (size >= 1e5 || size < 1e-3)) return value.toExponential(0);
  return String(Number(value.toPrecision(3)));
}
