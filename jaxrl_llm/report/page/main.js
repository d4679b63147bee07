// The page: its runs, tabs and what they share.

const COLOURS = [
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b3a100", "#56b4e9", "#7a4fd0", "#7a7a7a",
];
const RELOAD_MS = 30000;
const HEADLINES = [
  /^critic\/score\/mean$/, /^val-core\//, /eval_/, /^(.*: )?loss$/, /^(.*: )?accuracy$/,
  /^actor\/entropy$/, /^actor\/(ppo_kl|kl_loss|pg_clipfrac|grad_norm)$/, /^kl$/,
  /^response_length\/(mean|clip_ratio)$/, /^perf\/(throughput|time_per_step)$/,
];
// Metrics that a compilation changes.
const TIMED = /^(.*: )?(timing_s\/|timing_per_token_ms\/|perf\/(throughput|time_per_step|mfu))/;
const FEW = 12; // a curve with as many points, or with a value in less than half of the steps, is sparse

// The name of a training with its ": ", or nothing for the run's own steps.
function trainingOf(name) {
  return name.includes(": ") ? `${name.split(": ")[0]}: ` : "";
}

function isSparse(run, name) {
  const training = trainingOf(name), curve = run.curves[name];
  const counts = Object.keys(run.curves).filter((other) => trainingOf(other) === training)
    .map((other) => run.curves[other].of);
  return curve.of <= FEW || curve.of * 2 < Math.max(...counts);
}

// The steps that compiled programs; where nothing counts these, the first one.
function compilingSteps(run, name) {
  const counted = run.curves[`${trainingOf(name)}perf/compilations`];
  const curve = run.curves[name];
  return new Set(counted ? counted.steps.filter((_, i) => counted.values[i] > 0) : curve.steps.slice(0, 1));
}

class Page {
  constructor(data) {
    this.data = data;
    this.view = new View();
    this.hidden = new Set();
    this.text = "";
    data.runs.forEach((run, i) => { run.colour = COLOURS[i % COLOURS.length]; });
    this.runTable = new RunTable(this);
    this.samples = new SamplesTab(this);
    this.config = new ConfigTab(this);
    this.tabs = {
      Overview: () => this.overview(),
      Curves: () => this.curves(),
      "Times and memory": () => stagesTab(this),
      Samples: () => this.samples.nodes(),
      Alarms: () => alarmsTab(this),
      Config: () => this.config.nodes(),
    };
    this.state = new URLSearchParams(location.hash.slice(1));
  }

  runs() { return this.data.runs.filter((run) => !this.hidden.has(run)); }

  metrics() {
    return [...new Set(this.runs().flatMap((run) => Object.keys(run.curves)))].sort();
  }

  // `same`: other metrics with the same values.
  chart(name, same = []) {
    const series = [], marks = [], timed = TIMED.test(name);
    for (const run of this.runs()) {
      const curve = run.curves[name];
      if (curve) {
        const skip = timed ? compilingSteps(run, name) : null;
        series.push({ name: run.name, colour: run.colour, sparse: isSparse(run, name), skip, ...curve });
      }
      for (const alarm of run.alarms.filter((one) => one.metric === name)) {
        marks.push({ step: alarm.step, colour: "#b42318", text: `alarm ${alarm.name}` });
      }
    }
    const notes = [this.explained(name)];
    if (same.length) notes.push(element("div", { class: "explained" }, `The same values: ${same.join(", ")}.`));
    return new Chart(this.view, name, series, marks, notes);
  }

  // What docs/metrics.md says of a metric.
  explained(name) {
    const text = this.data.explained[name];
    return text ? element("div", { class: "explained", title: text }, text) : "";
  }

  chartBar() {
    return element("div", { class: "bar" },
      labelled("smoothing", element("input", {
        type: "range", min: 0, max: 0.98, step: 0.01, value: this.view.smoothing, "aria-label": "smoothing",
        oninput: (event) => this.view.change({ smoothing: Number(event.target.value) }),
      })),
      labelled("logarithmic", checkbox(this.view.logarithmic, (on) => this.view.change({ logarithmic: on }))),
      element("button", { onclick: () => this.view.whole() }, "Whole run"),
      note("Drag over a chart to zoom, double-click to see the whole run."));
  }

  // Charts of what varies, one for equal curves, and a table of what does not.
  cells(names) {
    const runs = this.runs(), groups = new Map(), constant = [];
    for (const name of names) {
      const curves = runs.map((run) => run.curves[name]);
      if (curves.every((curve) => !curve || curve.values.every((value) => value === curve.values[0]))) {
        constant.push(name);
        continue;
      }
      const key = JSON.stringify(curves.map((curve) => curve && [curve.steps, curve.values]));
      groups.set(key, [...(groups.get(key) || []), name]);
    }
    const charts = [...groups.values()].map(([name, ...same]) => this.chart(name, same).node);
    return [element("div", { class: "grid" }, ...charts), constant.length ? this.constants(constant) : ""];
  }

  constants(names) {
    const runs = this.runs(), heads = [["constant", ""], ...runs.map((run) => [run.name, "number"]), ["", ""]];
    const rows = names.map((name) => element("tr", {}, element("td", {}, name),
      ...runs.map((run) => element("td", { class: "number" }, number((run.curves[name] || { values: [] }).values[0]))),
      element("td", {}, this.explained(name))));
    return table(heads, rows, { class: "constants" });
  }

  overview() {
    const rank = (name) => HEADLINES.findIndex((pattern) => pattern.test(name));
    const names = this.metrics().filter((name) => rank(name) >= 0).sort((a, b) => rank(a) - rank(b));
    const few = this.data.runs.some((run) => Object.values(run.curves).some((c) => c.of > c.steps.length))
      ? note(`Curves are drawn from at most ${this.data.limits.points} points: the ends, and the lowest and highest `
        + "of each stretch of steps. metrics.jsonl has every step.") : null;
    const about = aboutTable(this.runs());
    const curves = names.length ? this.cells(names) : [note("No step has ended yet.")];
    return [...this.runTable.nodes(), this.chartBar(), few || "", ...curves,
      ...(about ? [element("h2", {}, "About"), about] : [])];
  }

  curves() {
    const body = element("div", {});
    const fill = () => {
      this.view.forget();
      const wanted = this.text.toLowerCase();
      const names = this.metrics().filter((name) => name.toLowerCase().includes(wanted));
      const groups = new Map();
      for (const name of names) {
        const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "others";
        groups.set(group, [...(groups.get(group) || []), name]);
      }
      body.replaceChildren(...[...groups].flatMap(([group, inside]) =>
        [element("h2", {}, group), ...this.cells(inside)]));
    };
    const bar = this.chartBar();
    bar.prepend(search("Search metrics", this.text, (text) => { this.text = text; fill(); }));
    fill();
    return [bar, body];
  }

  show(tab) {
    this.state.set("tab", tab);
    history.replaceState(null, "", `#${this.state}`);
    this.view.forget();
    for (const button of document.getElementById("tabs").children) {
      button.setAttribute("aria-selected", String(button.textContent === tab));
    }
    document.getElementById("main").replaceChildren(...this.tabs[tab]());
  }

  start() {
    const { runs, written } = this.data;
    document.title = `Report: ${runs.map((run) => run.name).join(", ")}`;
    document.getElementById("runs").append(...runs.map((run) => this.runButton(run)));
    document.getElementById("written").append(`written ${written} `,
      labelled("reload", checkbox(this.state.has("reload"), (on) => this.reload(on))));
    document.getElementById("tabs").append(...Object.keys(this.tabs).map((name) =>
      element("button", { role: "tab", onclick: () => this.show(name) }, name)));
    const tab = this.state.get("tab");
    this.show(tab in this.tabs ? tab : "Overview");
    this.reload(this.state.has("reload"));
    window.addEventListener("resize", () => this.view.change({}));
  }

  runButton(run) {
    const button = element("button", {
      class: "run", "aria-pressed": "true",
      onclick: () => {
        if (!this.hidden.delete(run)) this.hidden.add(run);
        button.setAttribute("aria-pressed", String(!this.hidden.has(run)));
        this.show(this.state.get("tab"));
      },
    }, dot(run.colour), run.name);
    return button;
  }

  // Opens the page again now and then, to follow a run.
  reload(on) {
    clearTimeout(this.timer);
    if (on) this.state.set("reload", "1"); else this.state.delete("reload");
    history.replaceState(null, "", `#${this.state}`);
    if (on) this.timer = setTimeout(() => location.reload(), RELOAD_MS);
  }
}

new Page(JSON.parse(document.getElementById("data").textContent)).start();
