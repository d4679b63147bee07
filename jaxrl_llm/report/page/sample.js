// One sample: its texts, its tokens with their numbers, its reward.

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
    .filter(([, , values]) => values && values.length)
    .map(([name, meaning, values]) =>
      [name, meaning, values.map((value, i) => (isObserved(sample, i) ? null : value))]);
}

// What a user opened in the list. `quantity` outlives it: the next sample has the same colours.
class SampleView {
  static quantity = "probability";

  constructor(run, sample, close) {
    Object.assign(this, { run, sample, close, body: element("div", {}) });
    this.node = element("section", { class: "sample", id: "sample" }, this.head(), this.body);
    this.update();
  }

  head() {
    const { step, index, policy_version: version } = this.sample;
    return element("div", { class: "bar" },
      element("h2", {}, `${this.run.name}, step ${step}, sample ${index}, policy of step ${version}`),
      element("button", { onclick: this.close }, "Close"));
  }

  update() {
    const { sample } = this, tokens = this.tokens();
    this.body.replaceChildren(
      ...this.images(),
      ...(sample.conversation ? [...conversationNodes(sample), ...tokens]
        : [...titled("Prompt", sample.prompt), ...tokens, ...titled("Response", sample.response)]),
      ...titled("Ground truth", sample.ground_truth), ...failures(sample), ...reward(sample));
  }

  images() {
    const found = this.run.images || {};
    return (this.sample.images || []).map((name, i) => (found[name]
      ? element("img", { class: "image", src: found[name], alt: `image ${i + 1}` })
      : note(`Image ${i + 1} is left out: trace/images/${name}`)));
  }

  tokens() {
    const head = element("h3", {}, "Response, token by token"), { sample } = this;
    const found = quantities(sample);
    if (!found.length) return [head, note("The trace has no number of single tokens here.")];
    const [name, meaning, values] = found.find(([n]) => n === SampleView.quantity) || found[0];
    const chooser = select(found.map(([n]) => [n, n]), name, (chosen) => {
      SampleView.quantity = chosen;
      this.update();
    });
    const readout = element("div", { class: "readout", id: "token" }, "Click a token.");
    const scale = new Scale(name, values);
    const spans = sample.tokens.map((id, i) => this.token(id, i, found, scale.colour(values[i]), readout));
    const left = sample.num_tokens - sample.tokens.length;
    return [
      head,
      element("div", { class: "bar" }, labelled("colour", chooser), element("span", {}, meaning), ...scale.legend()),
      element("div", { class: "tokens" }, ...spans), readout,
      left > 0 ? note(`${left} further tokens are in the trace.`) : "",
    ];
  }

  token(id, i, found, colour, readout) {
    const text = this.run.texts[id], shown = text === undefined ? `${id} ` : text || "∅";
    const observed = isObserved(this.sample, i);
    const all = observed ? KINDS.observed
      : found.map(([name, , values]) => `${name} ${number(values[i])}`).join(", ");
    const button = element("button", {
      class: observed ? "token observed" : "token", title: all, "aria-pressed": "false",
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

function titled(title, value) {
  if (value === null || value === undefined) return [];
  return [element("h3", {}, title), element("pre", {}, String(value))];
}

function failures(sample) {
  return Object.values(sample.failures).map((one) => element("p", { class: "bad" }, String(one)));
}

function reward(sample) {
  const said = { score: sample.score, ...sample.parts, ...sample.extras };
  const facts = Object.entries(said).map(([name, value]) => element("tr", {},
    element("td", {}, name),
    element("td", {}, typeof value === "number" ? number(value) : shownText(value))));
  return [element("h3", {}, "Reward"), table([["what", ""], ["value", ""]], facts)];
}

// What a reward function says of the answer: `reason`, or `<function>/reason`, and its failures.
function reasons(sample) {
  const said = Object.entries(sample.extras)
    .filter(([name, value]) => /(^|\/)reason$/.test(name) && value)
    .map(([, value]) => shownText(value));
  return [...said, ...Object.values(sample.failures).map(String)];
}

// Colours of one quantity: from white to blue, or around a middle from red to blue.
class Scale {
  constructor(name, values) {
    const given = values.filter((value) => value !== null && isFinite(value));
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
