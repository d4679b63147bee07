// Alarms, the config, and what a run says of itself.

function alarmsTab(page) {
  const runs = page.runs(), heads = [["run", ""], ["step", "number"], ["alarm", ""], ["action", ""],
    ["metric", ""], ["value", "number"], ["threshold", "number"], ["look at", ""]];
  const rows = runs.flatMap((run) => run.alarms.map((alarm) => element("tr", {},
    element("td", {}, dot(run.colour), run.name),
    element("td", { class: "number" }, String(alarm.step)),
    element("td", {}, alarm.name),
    element("td", { class: alarm.action === "stop" ? "bad" : null }, alarm.action),
    element("td", {}, alarm.metric),
    element("td", { class: "number" }, number(alarm.value)),
    element("td", { class: "number" }, number(alarm.threshold)),
    element("td", {}, alarm.look_at))));
  const left = runs.reduce((sum, run) => sum + run.num_alarms - run.alarms.length, 0);
  return [left ? note(`${left} earlier alarms are in events.jsonl.`) : "",
    rows.length ? table(heads, rows) : note("No alarm."), ...watchers(runs)];
}

// Every watcher, and what it saw: a quiet one has watched its metrics.
function watchers(runs) {
  const names = [...new Set(runs.flatMap((run) => run.watchers.map((one) => one.name)))];
  if (!names.length) return [];
  const rows = names.map((name) => {
    const each = runs.map((run) => [run, run.watchers.find((one) => one.name === name)]);
    const [, first] = each.find(([, one]) => one);
    return element("tr", {}, element("td", {}, name),
      element("td", {}, first.metrics.join(", ")),
      element("td", { class: "number" }, number(first.threshold)),
      ...each.map(([run, one]) => element("td", {}, one ? watched(run, one) : "")));
  });
  const heads = [["watcher", ""], ["metrics", ""], ["threshold", "number"], ...runs.map((run) => [run.name, ""])];
  return [element("h2", {}, "Watchers"), table(heads, rows, { id: "watchers" })];
}

function watched(run, { name, action, metrics }) {
  const fired = run.alarms.filter((alarm) => alarm.name === name).length;
  if (fired) return element("span", { class: "bad" }, `${fired} ${fired === 1 ? "alarm" : "alarms"}`);
  if (action === "off") return "off";
  return metrics.length ? "quiet" : "no such metric";
}

class ConfigTab {
  constructor(page) {
    this.page = page;
    this.text = "";
    this.differing = page.data.runs.length > 1;
  }

  nodes() {
    this.body = element("div", {});
    this.update();
    const bar = element("div", { class: "bar" },
      search("Search keys and values", this.text, (text) => { this.text = text; this.update(); }));
    if (this.page.data.runs.length > 1) {
      bar.append(labelled("differences only", checkbox(this.differing, (on) => {
        this.differing = on;
        this.update();
      })));
    }
    return [bar, this.body];
  }

  update() {
    const runs = this.page.runs(), wanted = this.text.toLowerCase();
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((key) => {
      const values = runs.map((run) => run.config[key]);
      const differ = new Set(values).size > 1;
      return (!this.differing || differ) && `${key} ${values.join(" ")}`.toLowerCase().includes(wanted);
    });
    const rows = keys.map((key) => element("tr", {}, element("td", {}, key),
      ...runs.map((run) => element("td", {}, run.config[key] ?? "(not set)"))));
    const heads = [["key", ""], ...runs.map((run) => [run.name, ""])];
    this.body.replaceChildren(note(`${keys.length} keys`), table(heads, rows, { id: "config" }));
  }
}

function aboutTable(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.about)))];
  if (!keys.length) return null;
  const rows = keys.map((key) => element("tr", {}, element("td", {}, key),
    ...runs.map((run) => element("td", {}, shownText(run.about[key] ?? "")))));
  return table([["", ""], ...runs.map((run) => [run.name, ""])], rows, { id: "about" });
}
