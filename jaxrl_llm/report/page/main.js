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

class Page {
  constructor(data) {
    this.data = data;
    this.view = new View();
    this.hidden = new Set();
    this.text = "";
    data.runs.forEach((run, i) => { run.colour = COLOURS[i % COLOURS.length]; });
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

  chart(name) {
    const series = [], marks = [];
    for (const run of this.runs()) {
      if (run.curves[name]) series.push({ name: run.name, colour: run.colour, ...run.curves[name] });
      for (const alarm of run.alarms.filter((one) => one.metric === name)) {
        marks.push({ step: alarm.step, colour: "#b42318", text: `alarm ${alarm.name}` });
      }
    }
    return new Chart(this.view, name, series, marks);
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

  grid(names) {
    return element("div", { class: "grid" }, ...names.map((name) => this.chart(name).node));
  }

  overview() {
    const rank = (name) => HEADLINES.findIndex((pattern) => pattern.test(name));
    const names = this.metrics().filter((name) => rank(name) >= 0).sort((a, b) => rank(a) - rank(b));
    const few = this.data.runs.some((run) => Object.values(run.curves).some((c) => c.of > c.steps.length))
      ? note(`Curves are drawn from at most ${this.data.limits.points} points: the ends, and the lowest and highest `
        + "of each stretch of steps. metrics.jsonl has every step.") : null;
    const about = aboutTable(this.runs());
    return [about || "", this.chartBar(), few || "",
      names.length ? this.grid(names) : note("No step has ended yet.")];
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
        [element("h2", {}, group), this.grid(inside)]));
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
