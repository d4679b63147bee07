// The table of runs: what differs, and how one metric began, was at its best, and ended.

const SCORES = [
  /^val-core\/.*\/acc\/mean@/, /^val-core\/.*\/reward\/mean@/, /^eval_rewards\/accuracies$/, /^eval_accuracy$/,
  /^eval_loss$/, /^critic\/score\/mean$/, /^rewards\/accuracies$/, /^accuracy$/, /^loss$/,
];
const LOWER_IS_BETTER = /loss|absolute_error|(^|\/)kl$/;
const PLACES = new Set(["run_dir", "name", "resume", "compile_cache"]); // keys that change nothing that is learnt
const MOST_KEYS = 8;

class RunTable {
  constructor(page) {
    this.page = page;
    this.metric = this.metrics()[0] || "";
    this.order = null; // [column, 1 or -1]
  }

  // All metrics; those that measure success come first.
  metrics() {
    const rank = (name) => {
      const found = SCORES.findIndex((pattern) => pattern.test(name));
      return found < 0 ? SCORES.length : found;
    };
    const sought = JSON.parse((this.page.data.runs[0] || { config: {} }).config["checkpoint.best_metric"] || "null");
    return this.page.metrics().sort((a, b) => rank(a) - rank(b))
      .sort((a, b) => (b === clean(sought)) - (a === clean(sought)));
  }

  nodes() {
    if (!this.metric) return [];
    this.body = element("div", {});
    this.update();
    return [this.body];
  }

  columns() {
    const keys = changedKeys(this.page.data.runs), lower = LOWER_IS_BETTER.test(this.metric);
    const curve = (run) => run.curves[this.metric] || { steps: [], values: [] };
    const best = (run) => bestOf(curve(run), lower);
    const one = (head, value, shown = number) => ({ head, value, shown, kind: "number" });
    return [
      { head: "run", value: (run) => run.name, shown: (name, run) => [dot(run.colour), name], kind: "" },
      ...keys.slice(0, MOST_KEYS).map((key) => ({
        head: key, value: (run) => parsed(run.config[key]), shown: shownText, kind: "",
      })),
      one("steps", (run) => lastStep(run), (step, run) => [String(step), total(run)]),
      one("start", (run) => curve(run).values[0]),
      { ...one(lower ? "lowest" : "best", (run) => curve(run).values[best(run)]), kind: "number best" },
      one("at step", (run) => curve(run).steps[best(run)], (step) => String(step)),
      one("end", (run) => curve(run).values.at(-1)),
      one("minutes", (run) => minutes(run), (value) => value.toFixed(1)),
      one("tokens/s/device", (run) => (run.curves["perf/throughput"] || {}).median),
    ];
  }

  update() {
    const runs = [...this.page.runs()], columns = this.columns();
    if (this.order) {
      const [head, sign] = this.order, { value } = columns.find((column) => column.head === head) || columns[0];
      runs.sort((a, b) => sign * compare(value(a), value(b)));
    }
    const heads = columns.map((column) => this.head(column));
    const rows = runs.map((run) => element("tr", {}, ...columns.map(({ value, shown, kind }) => {
      const found = value(run), nodes = found === undefined ? [] : [shown(found, run)].flat();
      return element("td", { class: kind }, ...nodes);
    })));
    const left = changedKeys(this.page.data.runs).length - MOST_KEYS;
    const metrics = select(this.metrics().map((name) => [name, name]), this.metric, (name) => {
      this.metric = name;
      this.update();
    });
    this.body.replaceChildren(
      element("div", { class: "bar" }, labelled("metric", metrics), this.page.explained(this.metric)),
      element("table", { id: "leaders" }, element("thead", {}, element("tr", {}, ...heads)),
        element("tbody", {}, ...rows)),
      note("Minutes count steps and validations, with compiling. Tokens/s is the median of the steps."
        + (left > 0 ? ` ${left} more keys differ: tab Config.` : "")));
  }

  head({ head, kind }) {
    const [by, sign] = this.order || [];
    const sort = by !== head ? null : sign > 0 ? "ascending" : "descending";
    const click = () => { this.order = [head, by === head ? -sign : 1]; this.update(); };
    return element("th", { class: kind, scope: "col", "aria-sort": sort },
      element("button", { onclick: click }, head, sort ? (sign > 0 ? " ▲" : " ▼") : ""));
  }
}

// A name without the minus by which a config says that lower is better.
function clean(name) {
  return typeof name === "string" ? name.replace(/^-/, "") : "";
}

function parsed(json) {
  return json === undefined ? "" : JSON.parse(json);
}

function changedKeys(runs) {
  if (runs.length < 2) return [];
  return [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((key) =>
    !PLACES.has(key) && new Set(runs.map((run) => run.config[key])).size > 1);
}

// The place of the first best value; -1 without one.
function bestOf({ values }, lower) {
  return values.reduce((best, value, i) =>
    (best < 0 || (lower ? value < values[best] : value > values[best]) ? i : best), -1);
}

function lastStep(run) {
  const own = Object.keys(run.curves).filter((name) => !trainingOf(name));
  return own.length ? Math.max(...own.map((name) => run.curves[name].steps.at(-1))) : undefined;
}

function total(run) {
  const steps = run.config.total_steps;
  return steps && steps !== String(lastStep(run)) ? ` of ${steps}` : "";
}

function minutes(run) {
  const times = Object.keys(run.curves).filter((name) => /timing_s\/(step|testing)$/.test(name));
  return times.length ? times.reduce((sum, name) => sum + run.curves[name].sum, 0) / 60 : undefined;
}

// Numbers by size, the rest as text; what is missing comes last.
function compare(a, b) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");
}
