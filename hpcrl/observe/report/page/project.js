// The page of a project: its trials, and its runs in one table that is sorted by a click on a column's head.

const COLUMNS = [
  ["run", (row) => `${row.project}/${row.name}`], ["state", (row) => row.state], ["started", (row) => row.started], ["step", (row) => row.steps],
  ["score", (row) => row.score], ["at first", (row) => row.first_score], ["loss", (row) => row.loss], ["node hours", (row) => row.node_hours],
  ["goodput", (row) => row.goodput], ["seed", (row) => (row.seed == null ? null : Number(row.seed))], ["other settings than most", (row) => row.unlike.join("\n") || null],
];
const SHOWN = { started: (value) => when(value), goodput: (value) => `${(100 * value).toFixed(0)} %` };

function cell(row, [name, value]) {
  const found = value(row);
  if (name === "run") return el("td", {}, row.report ? el("a", { href: row.report }, found) : found, row.error ? el("div", { class: "bad" }, row.error) : null);
  if (name === "state") return el("td", {}, found ? el("i", { class: "dot", style: `background:${outcomeColour(found)}` }) : null, found || "–");
  if (name === "other settings than most") return el("td", {}, row.unlike.map((one) => el("div", {}, el("code", {}, one))));
  return el("td", {}, found == null ? "–" : (SHOWN[name] || number)(found));
}

function runsSection() {
  const state = { by: 0, down: false, find: "" }, body = el("tbody"), heads = el("tr");
  const shown = () => DATA.rows.filter((row) => COLUMNS.some(([, value]) => String(value(row) ?? "").includes(state.find)));
  const order = (left, right) => {
    const [one, other] = [left, right].map(COLUMNS[state.by][1]);
    if (one == null || other == null) return (one == null) - (other == null);  // what is not known comes last
    const less = typeof one === "number" ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true });
    return state.down ? -less : less;
  };
  const draw = () => {
    heads.replaceChildren(...COLUMNS.map(([name], at) => el("th", { scope: "col", "aria-sort": at !== state.by ? "none" : state.down ? "descending" : "ascending" },
      el("button", { onclick: () => { Object.assign(state, { by: at, down: at === state.by ? !state.down : typeof COLUMNS[at][1](DATA.rows[0] || { unlike: [] }) === "number" }); draw(); } }, name, at !== state.by ? "" : state.down ? " ↓" : " ↑"))));
    body.replaceChildren(...shown().sort(order).map((row) => el("tr", {}, COLUMNS.map((column) => cell(row, column)))));
  };
  draw();
  const tools = el("div", { class: "tools" }, el("label", {}, "Find", el("input", { type: "search", placeholder: "part of a name, a state or a setting", oninput: (event) => { state.find = event.target.value.trim(); draw(); } })));
  return [tools, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, heads), body))];
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Draw the mean score of each recipe by step, in a band from its lowest to its highest run. */
function bands(trial) {
  const curves = Object.entries(trial.curves).filter(([, points]) => points.length), all = curves.flatMap(([, points]) => points);
  if (!all.length) return null;
  const low = Math.min(...all.map((one) => one.low)), high = Math.max(...all.map((one) => one.high)), width = 640, height = 220, left = 52, bottom = 24;
  const x = (step) => left + (width - left - 8) * step / trial.steps, y = (value) => 8 + (height - bottom - 8) * (high > low ? (high - value) / (high - low) : 0.5);
  const axis = [...ticks(low, high, 4).map((value) => svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value))), ...ticks(0, trial.steps, 6).map((step) => svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, number(step)))];
  const drawn = curves.flatMap(([, points], at) => [
    svg("polygon", { fill: colour(at), "fill-opacity": 0.18, points: [...points.map((one) => `${x(one.step)},${y(one.high)}`), ...[...points].reverse().map((one) => `${x(one.step)},${y(one.low)}`)].join(" ") }),
    svg("polyline", { fill: "none", stroke: colour(at), "stroke-width": 2, points: points.map((one) => `${x(one.step)},${y(one.mean)}`).join(" ") })]);
  const legend = curves.map(([name], at) => el("span", {}, el("i", { style: `background:${colour(at)}` }), name));
  return el("div", {}, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "score by step", style: "width:100%;max-width:44rem;font-size:12px;fill:currentColor" }, ...axis, ...drawn), el("div", { class: "legend" }, legend));
}

function trialBox(trial) {
  const head = el("h3", {}, `${trial.project}/${trial.name}`);
  if (trial.error) return el("div", { class: "panel" }, head, el("p", { class: "bad" }, trial.error));
  const rows = Object.entries(trial.recipes).map(([name, one], at) => el("tr", {}, el("td", {}, el("i", { class: "dot", style: `background:${colour(at)}` }), name), el("td", {}, one.runs.length),
    el("td", {}, one.score ? `${number(one.score.mean)} (${number(one.score.low)} to ${number(one.score.high)})` : "–"), el("td", {}, one.score ? one.score.step : "–"), el("td", {}, one.stopped == null ? "no" : `at step ${one.stopped}`), el("td", {}, number(one.node_hours))));
  const names = ["recipe", "runs", "score", "step", "stopped", "node hours"];
  const full = trial.full_sweep ? `, of about ${number(trial.full_sweep)} of the full sweep` : "";
  return el("div", { class: "panel" }, head, trial.verdict.map((line) => el("p", {}, line)), bands(trial),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows))),
    el("p", { class: "faint" }, `${number(trial.node_hours)} node hours${full}. Bands reach from the lowest to the highest run. Intervals are wrong with ${100 * trial.alpha} % at most, over all looks and pairs.`));
}

const PARTS = { runs: ["Runs", runsSection], ...(DATA.trials.length ? { trials: ["Trials", () => DATA.trials.map(trialBox)] } : {}) };
for (const [name, [title, build]] of Object.entries(PARTS)) {
  document.querySelector("nav").append(el("a", { href: `#${name}` }, title));
  document.querySelector("main").append(el("section", { id: name, "aria-label": title }, el("h2", {}, title), build()));
}
document.querySelector("main").append(el("p", { class: "faint" }, `Made ${when(DATA.made)} from the files of the runs.`));
