// Samples: a table with filters. sample.js draws the one that is open, below its row.

const MOST_ROWS = 100;

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
  }

  nodes() {
    this.body = element("div", {});
    this.update();
    return [this.bar(), this.limits(), this.body];
  }

  limits() {
    const { steps, a_step: each } = this.page.data.limits;
    const left = this.page.runs().reduce((sum, run) => sum + run.samples_left_out, 0);
    return note(`The page holds the first ${each} samples of at most ${steps} training steps`
      + (left ? `, less ${left} that were left out for their size; ` : "; ")
      + "the trace in the run's folder has all of them. Click a sample to see its tokens.");
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
    const has = (sample) => `${sample.prompt}\n${sample.response}\n${conversationText(sample)}`
      .toLowerCase().includes(wanted);
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
    this.detail = null;
    const rows = found.slice(0, this.limit).flatMap((one) => this.row(one, many));
    const heads = [["step", "number"], ["source", ""], ["prompt", ""], ["response", ""],
      ["truth", ""], ["reason", ""], ["tokens", "number"], ["score", "number"]];
    if (many) heads.unshift(["run", ""]);
    const more = found.length > this.limit
      ? element("button", { onclick: () => { this.limit += MOST_ROWS; this.update(); } }, "Show more")
      : null;
    this.body.replaceChildren(note(`${found.length} samples`),
      table(heads, rows, { class: "samples" }), more || "");
  }

  // The row of a sample, and the open sample below it.
  row(one, many) {
    const { run, sample } = one, bad = Object.keys(sample.failures).length ? "bad" : "";
    const cells = [
      element("td", { class: "number" }, String(sample.step)),
      element("td", {}, `${sample.data_source}${sample.kind === "validation" ? " (held out)" : ""}`),
      element("td", { class: "text" }, sample.question ?? ending(sample.prompt || "", 160)),
      element("td", { class: "text" }, sample.response || ""),
      element("td", { class: "text short" }, String(sample.ground_truth ?? "")),
      element("td", { class: `text short ${bad}` }, reasons(sample).join("; ")),
      element("td", { class: "number" }, `${sample.num_tokens}${sample.finished ? "" : " cut"}`),
      element("td", { class: `number ${bad}` }, number(sample.score)),
    ];
    if (many) cells.unshift(element("td", {}, dot(run.colour), run.name));
    const toggle = () => this.show(this.open && this.open.sample === sample ? null : one, row);
    const row = element("tr", {
      tabindex: 0, onclick: toggle, onkeydown: (event) => { if (event.key === "Enter") toggle(); },
    }, ...cells);
    const open = this.open && this.open.sample === sample;
    return open ? [row, this.below(one, row)] : [row];
  }

  show(one, row) {
    if (this.detail) {
      this.detail.previousSibling.classList.remove("open");
      this.detail.remove();
      this.detail = null;
    }
    this.open = one;
    if (one) row.after(this.below(one, row));
  }

  below({ run, sample }, row) {
    row.classList.add("open");
    const view = new SampleView(run, sample, () => this.show(null));
    this.detail = element("tr", { class: "detail" },
      element("td", { colspan: row.children.length }, view.node));
    return this.detail;
  }
}
