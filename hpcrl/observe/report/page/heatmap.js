// Distributions over the steps, and what became of groups.

/** Draw the samples of each step by their value: the darker, the more of the step's samples. */
function heatmap(title, steps, histogram) {
  const canvas = el("canvas", { role: "img", "aria-label": `${title} of samples by step` });
  const box = el("div", { class: "chart" }, el("h4", {}, title), canvas);
  const height = 200, left = 56, bottom = 24, top = 6;
  let width = 0;
  const bins = histogram.counts[0].length, totals = histogram.counts.map((row) => row.reduce((sum, count) => sum + count, 0));
  const draw = (outer) => {
    width = outer - 18;
    const context = prepared(canvas, width, height), wide = (width - left) / steps.length, tall = (height - bottom - top) / bins;
    histogram.counts.forEach((row, at) => row.forEach((count, bin) => {
      if (!count) return;
      context.globalAlpha = 0.12 + 0.88 * Math.sqrt(count / totals[at]);
      context.fillStyle = PALETTE[0];
      context.fillRect(left + at * wide, height - bottom - (bin + 1) * tall, Math.ceil(wide), Math.ceil(tall));
    }));
    context.globalAlpha = 1;
    context.fillStyle = style("--faint");
    context.font = "11px system-ui";
    context.textAlign = "right";
    for (const value of ticks(histogram.low, histogram.high, 4)) {
      const share = (value - histogram.low) / (histogram.high - histogram.low || 1);
      context.fillText(number(value), left - 6, height - bottom - share * (height - bottom - top) + 4);
    }
    context.textAlign = "center";
    const every = Math.max(1, Math.ceil(steps.length / Math.max(2, Math.floor(width / 70))));
    steps.forEach((step, at) => { if (at % every === 0) context.fillText(step, left + (at + 0.5) * wide, height - 8); });
  };
  canvas.addEventListener("pointermove", (event) => {
    const at = Math.floor((event.offsetX - left) / ((width - left) / steps.length)), bin = Math.floor((height - bottom - event.offsetY) / ((height - bottom - top) / bins));
    const count = histogram.counts[at]?.[bin], size = (histogram.high - histogram.low) / bins;
    showTip(event, count == null ? "" : `step ${steps[at]}, ${number(histogram.low + bin * size)} to ${number(histogram.low + (bin + 1) * size)}: ${count} of ${totals[at]} samples`);
  });
  canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
  onWidth(box, draw);
  return box;
}

/** Draw a few columns by step that are no metrics. */
function plainChart(title, steps, columns, range) {
  const box = el("div", { class: "chart", role: "figure", "aria-label": title }, el("h4", {}, title));
  const names = Object.keys(columns);
  const options = {
    width: 320, height: HEIGHT, scales: { x: { time: false }, ...(range ? { y: { range } } : {}) }, legend: { show: names.length > 1 },
    series: [{ label: "step" }, ...names.map((name, at) => ({ label: name, stroke: colour(at), width: 1.6, value: (_, value) => number(value) }))],
    axes: axesOf(),
  };
  let plot = null;
  onWidth(box, (width) => {
    plot ??= new uPlot(options, [steps, ...names.map((name) => columns[name])], box);
    plot.setSize({ width: Math.max(200, width - 18), height: HEIGHT });
  });
  return box;
}

function groupsSection() {
  const shown = el("div");
  const show = (at) => {
    const groups = DATA.runs[at].groups;
    if (!groups) return shown.replaceChildren(el("p", { class: "faint" }, "This run has no groups of samples with rewards."));
    const { steps, dropped } = groups, lost = dropped.counts.some(Boolean) || groups.given_up.some(Boolean);
    return shown.replaceChildren(
      el("div", { class: "charts" },
        heatmap("Reward", steps, groups.reward), heatmap("Response length, tokens", steps, groups.length),
        plainChart("Why samples ended, share", steps, groups.stops, [0, 1]),
        plainChart("Groups with equal rewards, share", steps, { alike: groups.alike }, [0, 1]),
        lost ? plainChart("Groups that are not trained", steps, { dropped: dropped.counts, "given up": groups.given_up }) : null),
      lost ? el("p", { class: "faint" }, "Dropped: dynamic sampling kept them from training. Given up: surplus groups for which no step waited.") : el("p", { class: "faint" }, "No group was dropped or given up."),
      dropped.some.length ? folded(`The last ${dropped.some.length} dropped groups`, () => el("div", { class: "scroll" }, table(["step", "group", "why"], dropped.some.slice().reverse().map((one) => [one.step, one.group, one.why])))) : "",
    );
  };
  let chosen = 0;
  document.addEventListener("newer", () => show(chosen));
  show(0);
  return [runPicker((at) => show((chosen = at))), shown];
}

/** Make a table; with "stack" each row is a list in a narrow window, with the names of the columns. */
function table(head, rows, kind = "stack") {
  return el("table", { class: kind }, el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, at) => el("td", { "data-name": head[at] }, cell instanceof Node ? cell : String(cell ?? "–")))))));
}
