// Where the time of a step goes, and memory. Validation (`testing`) comes after a step.

const STAGE = "timing_s/";
const STAGE_COLOURS = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a100", "#7a7a7a",
];

function stageNames(run) {
  return Object.keys(run.curves).filter((name) =>
    name.startsWith(STAGE) && name !== `${STAGE}step` && name !== `${STAGE}testing`);
}

// Stages on top of each other, over the steps of the first one.
class StackedChart extends Chart {
  lines() {
    const steps = [...new Set(this.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
    const sums = steps.map(() => 0);
    this.stacked = this.series.map((one) => {
      const below = [...sums];
      steps.forEach((step, i) => {
        const at = nearest(one.steps, step);
        if (one.steps[at] === step || (one.dense && step > one.steps[0])) sums[i] += one.values[at];
      });
      return { ...one, steps, below, values: [...sums] };
    });
    return [...this.stacked, { steps, values: steps.map(() => 0) }];
  }

  paint(pen) {
    for (const { steps, values, below, colour } of this.stacked) {
      pen.fillStyle = colour;
      pen.beginPath();
      steps.forEach((step, i) => pen.lineTo(this.px(step), this.py(values[i])));
      for (let i = steps.length - 1; i >= 0; i--) pen.lineTo(this.px(steps[i]), this.py(below[i]));
      pen.fill();
    }
  }

  point() {}
}

function stageTable(runs) {
  const names = [...new Set(runs.flatMap(stageNames))];
  const heads = [["stage", ""]];
  for (const run of runs) heads.push([`${run.name} (median s)`, "number"], ["share", "number"]);
  const rows = names.map((name) => {
    const cells = runs.flatMap((run) => {
      const curve = run.curves[name], whole = run.curves[`${STAGE}step`];
      if (!curve) return ["", ""];
      const share = whole ? curve.median / whole.median : NaN;
      return [number(curve.median), isFinite(share) ? `${Math.round(share * 100)} %` : ""];
    });
    return element("tr", {}, element("td", {}, name.slice(STAGE.length)),
      ...cells.map((text) => element("td", { class: "number" }, text)));
  });
  return table(heads, rows);
}

function stagesTab(page) {
  const runs = page.runs();
  const nodes = [element("h2", {}, "Seconds of each stage")];
  for (const run of runs) {
    const series = stageNames(run).map((name, i) => ({
      name: name.slice(STAGE.length),
      colour: STAGE_COLOURS[i % STAGE_COLOURS.length],
      ...run.curves[name],
      dense: run.curves[name].of === (run.curves[`${STAGE}step`] || {}).of,
      skip: compilingSteps(run, name),
    }));
    if (series.length) nodes.push(new StackedChart(page.view, run.name, series).node);
  }
  const memory = page.metrics().filter((name) => /memory|_gb$|bytes/.test(name)
    && !name.startsWith("communication/"));
  const speed = page.metrics().filter((name) => /throughput|mfu|time_per_step/.test(name));
  return [page.chartBar(), ...nodes, element("h2", {}, "Stages"), stageTable(runs),
    element("h2", {}, "Memory"), ...page.cells(memory), element("h2", {}, "Speed"), ...page.cells(speed)];
}
