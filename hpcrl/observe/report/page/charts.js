// Curves: all runs in each chart, attempts marked; drawn when they come into sight. What never changes is a table.

const view = { smooth: 0, byTime: false, charts: new Set() };
const HEIGHT = 180, DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const EVALUATION = /^eval\//, ALWAYS = /^(reward|eval)\//;

const known = (run, name) => (run.curves.metrics[name] || []).filter((value) => value != null);

/** Return the charts of all runs in their order: category, title, and the metrics that any of the runs reports. */
function keyCharts() {
  const found = new Map();
  for (const [category, title, names] of DATA.runs.flatMap((run) => run.charts)) {
    const one = found.get(title) || { category, title, names: [] };
    found.set(title, { ...one, names: [...new Set([...one.names, ...names])] });
  }
  return [...found.values()];
}

/** Return the only value of metrics in all runs; null where they differ, or change. */
function constant(names) {
  const values = new Set(names.flatMap((name) => DATA.runs.flatMap((run) => known(run, name))));
  return values.size === 1 ? [...values][0] : null;
}

/** Return what tells metrics of one chart apart: the parts of their names that are not the same. */
function labels(names) {
  const parts = names.map((name) => name.split("/"));
  if (names.some((name) => EVALUATION.test(name)) && names.some((name) => !EVALUATION.test(name))) return names.map((name) => (EVALUATION.test(name) ? "evaluation" : "training"));
  const same = (at) => parts.every((own) => own.at(at) === parts[0].at(at));
  let before = 0, after = 0;
  while (before < parts[0].length && same(before)) before += 1;
  while (after < parts[0].length - before && same(-1 - after)) after += 1;
  return parts.map((own) => own.slice(before, own.length - after).join("/") || "mean");
}

/** Return the lines of a chart: run and metric, with label, colour and dashes; of equal lines of a run the first. */
function linesOf(all) {
  const seen = new Set(), values = (name) => JSON.stringify(DATA.runs.map((run) => run.curves.metrics[name] || []));
  const names = all.filter((name) => !seen.has(values(name)) && seen.add(values(name)));
  const own = labels(names), many = DATA.runs.length > 1;
  return names.flatMap((name, part) => DATA.runs.map((run, at) => ({
    run, name, label: !many ? own[part] : names.length > 1 ? `${run.name}, ${own[part]}` : run.name,
    stroke: colour(many ? at : part), dash: many ? DASHES[part % DASHES.length] : [], points: EVALUATION.test(name) && !EVALUATION.test(names[0]),
  })).filter(({ run }) => known(run, name).length));
}

function smoothed(values) {
  let kept = null;
  return values.map((value) => {
    if (value == null) return null;
    kept = kept == null ? value : view.smooth * kept + (1 - view.smooth) * value;
    return kept;
  });
}

/** Return uPlot's data: one axis for all lines, their values, and after them the raw ones where they are smoothed. */
function chartData(lines) {
  const points = lines.map(({ run, name }) => {
    const axis = view.byTime ? run.curves.seconds : run.curves.steps, values = run.curves.metrics[name] || [];
    return axis.map((at, place) => [at, values[place]]).filter(([, value]) => value != null);
  });
  const axis = [...new Set(points.flat().map(([at]) => at))].sort((left, right) => left - right);
  const columns = points.map((own) => {
    const values = new Map(own);
    return axis.map((at) => values.get(at) ?? null);
  });
  return [axis, ...columns.map((own, at) => (lines[at].points ? own : smoothed(own))), ...(view.smooth ? columns : [])];
}

const where = (at) => (view.byTime ? `at ${duration(at)}` : `step ${at}`);

function axesOf(byTime = false) {
  const grid = { stroke: style("--line"), width: 1 }, axis = { stroke: style("--faint"), grid, ticks: grid, font: "11px system-ui" };
  return [
    { ...axis, size: 28, space: 60, values: (_, found) => found.map((at) => (byTime ? duration(at) : at)) },
    { ...axis, size: 54, values: (_, found) => found.map(number) },
  ];
}

function chartOptions(lines, width, tell) {
  const value = (_, found) => number(found);
  const series = lines.map(({ label, stroke, dash, points }, at) => ({
    label, stroke, dash, width: 1.6, spanGaps: true, value, ...(points ? { paths: () => null } : {}),
    points: { show: points || ((plot) => plot.data[at + 1].filter((found) => found != null).length < 15), size: points ? 7 : 4, fill: points ? stroke : undefined },
  }));
  const raw = view.smooth ? lines.map(({ label, stroke }) => ({ label: `${label}, raw`, stroke: `${stroke}55`, width: 1, spanGaps: true, points: { show: false }, value })) : [];
  return {
    width, height: HEIGHT, cursor: { sync: { key: "curves" }, points: { size: 5 } }, legend: { show: lines.length > 1 },
    scales: { x: { time: false }, y: { range: (_, low, high) => (low === high ? [low - 1, high + 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
    series: [{ label: "step" }, ...series, ...raw], axes: axesOf(view.byTime), hooks: { draw: [markAttempts], setCursor: [tell] },
  };
}

/** Draw where attempts began: a line in the colour of how the one before it ended. */
function markAttempts(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([4, 3]);
  for (const run of DATA.runs) {
    run.attempts.slice(1).forEach((attempt, before) => {
      const at = view.byTime ? attempt.start : attempt.after;
      if (at == null) return;
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.strokeStyle = outcomeColour(run.attempts[before].kind);
      ctx.lineWidth = devicePixelRatio || 1;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    });
  }
  ctx.restore();
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.draw();
}, { rootMargin: "300px" });

/** Make a chart of metrics; beside its title is the newest value of a single line, or the one under the pointer. */
function chart(names, title) {
  const output = el("output"), tags = names.filter((name) => name !== title).join(", ");
  const box = el("div", { class: "chart", role: "figure" }, el("h4", {}, el("span", {}, title), output), tags ? el("small", { class: "tags", title: tags }, tags) : null);
  let plot = null, lines = [];
  const tell = ({ data, cursor: { idx } }) => {
    const single = lines.length === 1 ? number(idx == null ? known(lines[0].run, lines[0].name).at(-1) : data[1][idx]) : "";
    output.textContent = idx == null ? single : `${single} ${where(data[0][idx])}`;
  };
  box.draw = () => {
    seen.unobserve(box);
    plot?.destroy();
    lines = linesOf(names);
    const data = chartData(lines);
    plot = new uPlot(chartOptions(lines, Math.max(200, box.clientWidth - 18), tell), data, box);
    box.setAttribute("aria-label", `${title}: ${lines.map(({ run, name, label }) => `${lines.length > 1 ? `${label} ` : ""}${number(known(run, name)[0])} to ${number(known(run, name).at(-1))}`).join(", ")}`);
    tell(plot);
    view.charts.add(box);
  };
  box.update = () => {
    const { min, max } = plot.scales.x, axis = plot.data[0], zoomed = min > axis[0] || max < axis.at(-1);
    plot.setData(chartData(lines), !zoomed);
    if (zoomed) plot.redraw();
    tell(plot);
  };
  onWidth(box, (width) => plot?.setSize({ width: Math.max(200, width - 18), height: HEIGHT }));
  seen.observe(box);
  return box;
}

const redraw = () => view.charts.forEach((box) => box.isConnected && box.draw());
const grid = (boxes) => el("div", { class: "charts" }, boxes);

/** Make the table of what has one value in all steps of all runs. */
function constantsTable(names, titles) {
  return el("div", { class: "scroll" }, table(["value", "what", "metric"], names.map((name) => [number(constant([name])), titles.get(name) || "", el("code", {}, name)])));
}

function curvesSection() {
  const shown = el("div"), charts = keyCharts(), key = new Set(charts.flatMap(({ names }) => names));
  const titles = new Map(charts.flatMap(({ title, names }) => names.map((name) => [name, title])));
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves.metrics)))].filter((name) => DATA.runs.some((run) => known(run, name).length)).sort();
  const draw = (filter) => {
    view.charts.clear();
    if (filter) {
      const found = names.filter((name) => `${name} ${titles.get(name) || ""}`.toLowerCase().includes(filter.toLowerCase()));
      return shown.replaceChildren(found.length ? grid(found.slice(0, 60).map((name) => chart([name], name))) : el("p", { class: "faint" }, "No metric has this in its name or title."));
    }
    const moves = (own) => constant(own) == null || ALWAYS.test(own[0]);
    const rest = grouped(names.filter((name) => !key.has(name) && constant([name]) == null));
    const still = [...charts.filter(({ names: own }) => !moves(own)).flatMap(({ names: own }) => own), ...names.filter((name) => !key.has(name) && constant([name]) != null)];
    return shown.replaceChildren(
      grid(charts.filter(({ names: own }) => moves(own)).map(({ title, names: own }) => chart(own, title))),
      ...[...rest].map(([prefix, own]) => folded(`${prefix}/ (${own.length})`, () => grid(own.map((name) => chart([name], name))))),
      still.length ? folded(`The same in every step (${still.length})`, () => constantsTable(still, titles)) : "",
    );
  };
  const tools = el("div", { class: "tools" },
    el("label", {}, "Find", el("input", { type: "search", placeholder: "part of a name", oninput: (event) => draw(event.target.value.trim()) })),
    el("label", {}, "Smooth", el("input", { type: "range", min: 0, max: 0.97, step: 0.01, value: view.smooth, oninput: (event) => { view.smooth = Number(event.target.value); redraw(); } })),
    el("label", {}, "Over", el("select", { onchange: (event) => { view.byTime = event.target.value === "time"; redraw(); } }, el("option", { value: "step" }, "steps"), el("option", { value: "time", selected: view.byTime }, "wall time"))),
  );
  const each = Math.max(...DATA.runs.map((run) => run.curves.each)), several = DATA.runs.some((run) => run.attempts.length > 1);
  const note = `${several ? "Dashed lines: a new attempt goes on there. " : ""}Drag over a chart to zoom, double-click for the whole.${each > 1 ? ` A point is the mean of up to ${each} steps.` : ""}`;
  draw("");
  return [tools, el("p", { class: "faint" }, note), shown];
}

function grouped(names) {
  const found = new Map();
  for (const name of names) found.set(name.split("/")[0], [...(found.get(name.split("/")[0]) || []), name]);
  return found;
}

/** Make a part that is built when it is first opened. */
function folded(title, build) {
  const box = el("details", {}, el("summary", {}, title));
  box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(build()); });
  return box;
}
