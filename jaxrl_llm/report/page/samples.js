// Samples: a table with filters, and one sample token by token.

const MOST_ROWS = 100;

// What a token can be coloured by: [name, what it means, values of a sample or null].
const QUANTITIES = [
  ["probability", "of the sampler", (d) => d.logprobs && d.logprobs.map(Math.exp)],
  ["advantage", "of the update", (d, n) => spread(d.advantages, n)],
  ["ratio", "trainer / sampler, before the update", (d) => difference(d.old_logprobs, d.logprobs, Math.exp)],
  ["kl", "policy less reference, log", (d) => difference(d.old_logprobs, d.reference_logprobs, (x) => x)],
  ["value", "of the critic", (d) => d.values],
  ["surprise", "minus log-prob", (d) => d.logprobs && d.logprobs.map((x) => -x)],
];

// One number stands for all tokens.
function spread(values, count) {
  return typeof values === "number" ? Array(count).fill(values) : values;
}

function difference(a, b, f) {
  return a && b && a.length === b.length ? a.map((x, i) => f(x - b[i])) : null;
}

function quantities(sample) {
  return QUANTITIES
    .map(([name, meaning, of]) => [name, meaning, of(sample.details, sample.tokens.length)])
    .filter(([, , values]) => values && values.length);
}

// A table has room for the end of a prompt, where an older trace lacks the last turn of the user.
function ending(text, most) {
  return text.length > most ? `…${text.slice(-most)}` : text;
}

class SamplesTab {
  constructor(page) {
    this.page = page;
    this.filters = { kind: "", source: "", text: "", order: "newest", least: "", most: "" };
    this.limit = MOST_ROWS;
    this.open = null;
    this.quantity = "probability";
  }

  nodes() {
    this.body = element("div", {});
    this.detail = element("div", { id: "sample" });
    this.update();
    return [this.bar(), this.limits(), this.detail, this.body];
  }

  limits() {
    const { steps, a_step: each } = this.page.data.limits;
    const left = this.page.runs().reduce((sum, run) => sum + run.samples_left_out, 0);
    return note(`The page holds the first ${each} samples of at most ${steps} training steps`
      + (left ? `, less ${left} that were left out for their size; ` : "; ")
      + "the trace in the run's folder has all of them.");
  }

  bar() {
    const set = (key) => (value) => { this.filters[key] = value; this.limit = MOST_ROWS; this.update(); };
    const sources = [...new Set(this.all().map(({ sample }) => sample.data_source))].sort();
    return element("div", { class: "bar" },
      search("Search prompts and responses", this.filters.text, set("text")),
      labelled("kind", select([["", "all"], ["train", "train"], ["validation", "validation"]],
        this.filters.kind, set("kind"))),
      labelled("source", select([["", "all"], ...sources.map((s) => [s, s])], this.filters.source, set("source"))),
      labelled("score from", this.numberInput("least", set)),
      labelled("to", this.numberInput("most", set)),
      labelled("order", select([["newest", "newest first"], ["oldest", "oldest first"],
        ["best", "best first"], ["worst", "worst first"], ["longest", "longest first"]],
      this.filters.order, set("order"))));
  }

  numberInput(key, set) {
    return element("input", {
      type: "number", step: "any", value: this.filters[key], style: "width: 6em",
      oninput: (event) => set(key)(event.target.value),
    });
  }

  all() {
    return this.page.runs().flatMap((run) => run.samples.map((sample) => ({ run, sample })));
  }

  chosen() {
    const { kind, source, text, order, least, most } = this.filters, wanted = text.toLowerCase();
    const has = (sample) => `${sample.prompt}\n${sample.response}`.toLowerCase().includes(wanted);
    const score = (sample) => sample.score ?? NaN;  // none if its reward failed
    const found = this.all().filter(({ sample }) =>
      (!kind || sample.kind === kind) && (!source || sample.data_source === source)
      && (least === "" || score(sample) >= Number(least))
      && (most === "" || score(sample) <= Number(most)) && (!wanted || has(sample)));
    const keys = {
      newest: (s) => -s.step, oldest: (s) => s.step, best: (s) => -(s.score ?? -Infinity),
      worst: (s) => s.score ?? Infinity, longest: (s) => -s.num_tokens,
    };
    return found.sort((a, b) => keys[order](a.sample) - keys[order](b.sample));
  }

  update() {
    const found = this.chosen(), many = this.page.runs().length > 1;
    const rows = found.slice(0, this.limit).map((one) => this.row(one, many));
    const heads = [["step", "number"], ["source", ""], ["prompt", ""], ["response", ""],
      ["tokens", "number"], ["score", "number"]];
    if (many) heads.unshift(["run", ""]);
    const more = found.length > this.limit
      ? element("button", { onclick: () => { this.limit += MOST_ROWS; this.update(); } }, "Show more")
      : null;
    this.body.replaceChildren(note(`${found.length} samples`),
      table(heads, rows, { class: "samples" }), more || "");
    this.detail.replaceChildren(...(this.open ? [this.one(this.open)] : []));
  }

  row(one, many) {
    const { run, sample } = one, show = () => { this.open = one; this.update(); };
    const cells = [
      element("td", { class: "number" }, String(sample.step)),
      element("td", {}, `${sample.data_source}${sample.kind === "validation" ? " (held out)" : ""}`),
      element("td", { class: "text" }, sample.question ?? ending(sample.prompt || "", 160)),
      element("td", { class: "text" }, sample.response || ""),
      element("td", { class: "number" }, `${sample.num_tokens}${sample.finished ? "" : " cut"}`),
      element("td", { class: `number ${Object.keys(sample.failures).length ? "bad" : ""}` }, number(sample.score)),
    ];
    if (many) cells.unshift(element("td", {}, dot(run.colour), run.name));
    const open = this.open && this.open.sample === sample;
    return element("tr", {
      tabindex: 0, class: open ? "open" : null, onclick: show,
      onkeydown: (event) => { if (event.key === "Enter") show(); },
    }, ...cells);
  }

  one({ run, sample }) {
    const close = element("button", { onclick: () => { this.open = null; this.update(); } }, "Close");
    const truth = sample.ground_truth === null || sample.ground_truth === undefined
      ? [] : [element("h3", {}, "Ground truth"), element("pre", {}, String(sample.ground_truth))];
    const said = { score: sample.score, ...sample.parts, ...sample.extras };
    const facts = Object.entries(said).map(([name, value]) => element("tr", {},
      element("td", {}, name),
      element("td", {}, typeof value === "number" ? number(value) : shownText(value))));
    const failures = Object.values(sample.failures).map((text) => element("p", { class: "bad" }, String(text)));
    return element("section", { class: "sample" },
      element("div", { class: "bar" }, element("h2", {}, `${run.name}, step ${sample.step}, `
        + `sample ${sample.index}, policy of step ${sample.policy_version}`), close),
      element("h3", {}, "Prompt"), element("pre", {}, sample.prompt || ""),
      element("h3", {}, "Response, token by token"), ...this.tokens(run, sample),
      element("h3", {}, "Response"), element("pre", {}, sample.response || ""),
      ...truth, ...failures, element("h3", {}, "Reward"), table([["what", ""], ["value", ""]], facts));
  }

  tokens(run, sample) {
    const found = quantities(sample);
    if (!found.length) return [note("The trace has no number of single tokens here.")];
    const [name, meaning, values] = found.find(([n]) => n === this.quantity) || found[0];
    const chooser = select(found.map(([n]) => [n, n]), name, (v) => { this.quantity = v; this.update(); });
    const readout = element("div", { class: "readout", id: "token" }, "Click a token.");
    const scale = new Scale(name, values);
    const spans = sample.tokens.map((id, i) => this.token(run, id, i, found, scale.colour(values[i]), readout));
    const left = sample.num_tokens - sample.tokens.length;
    return [
      element("div", { class: "bar" }, labelled("colour", chooser), element("span", {}, meaning), ...scale.legend()),
      element("div", { class: "tokens" }, ...spans), readout,
      left > 0 ? note(`${left} further tokens are in the trace.`) : "",
    ];
  }

  token(run, id, i, found, colour, readout) {
    const text = run.texts[id], shown = text === undefined ? `${id} ` : text || "∅";
    const all = found.map(([name, , values]) => `${name} ${number(values[i])}`).join(", ");
    const button = element("button", {
      class: "token", title: all, "aria-pressed": "false",
      onclick: () => {
        for (const other of button.parentNode.children) other.setAttribute("aria-pressed", "false");
        button.setAttribute("aria-pressed", "true");
        readout.textContent = `token ${i}, id ${id}, ${JSON.stringify(text ?? null)}: ${all}`;
      },
    }, shown.replaceAll("\n", "↵\n"));
    button.style.background = colour;
    return button;
  }
}

// Colours of one quantity: from white to blue, or around a middle from red to blue.
class Scale {
  constructor(name, values) {
    const given = values.filter((value) => isFinite(value));
    this.middle = { ratio: 1, advantage: 0, kl: 0 }[name];
    this.low = name === "probability" ? 0 : Math.min(...given);
    this.high = name === "probability" ? 1 : Math.max(...given);
    this.reach = Math.max(Math.abs(this.high - this.middle), Math.abs(this.middle - this.low)) || 1;
  }

  colour(value) {
    if (value === null || !isFinite(value)) return "#dddddd";
    if (this.middle !== undefined) {
      const strength = Math.min(Math.abs(value - this.middle) / this.reach, 1);
      return value < this.middle ? mixed([232, 106, 88], strength) : mixed([96, 156, 220], strength);
    }
    return mixed([96, 156, 220], (value - this.low) / (this.high - this.low || 1));
  }

  legend() {
    const low = this.middle === undefined ? this.low : this.middle - this.reach;
    const high = this.middle === undefined ? this.high : this.middle + this.reach;
    const strip = element("span", { class: "scale" });
    const stops = [0, 0.25, 0.5, 0.75, 1].map((t) => this.colour(low + t * (high - low)));
    strip.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    return [number(low) || "0", strip, number(high)];
  }
}

function mixed(colour, strength) {
  const [r, g, b] = colour.map((channel) => Math.round(245 + (channel - 245) * strength));
  return `rgb(${r}, ${g}, ${b})`;
}

function shownText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
