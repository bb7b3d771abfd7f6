// Curves: one chart per metric, all runs in it, attempts marked; drawn when they come into sight.

const KEY_CHARTS = {
  Learning: ["reward/avg_raw_reward", "eval/all/avg_score", "eval/all/loss", "policy/final_loss", "loss/avg_raw_advantages_abs", "reward/groups_without_spread"],
  Policy: ["policy/policy_entropy", "policy/policy_kl", "policy/loss_metrics/clip_ratio", "policy/grad_norm", "policy/policy_lr"],
  "Engines and trainer": ["policy/rollout_train_logprobs_abs_diff_mean", "policy/logprob_mismatch", "async/staleness_mean", "async/staleness_max"],
  Samples: ["generate/avg_num_tokens", "generate/max_num_tokens", "generate/stop_ratio", "generate/dropped_groups", "generate/failed_samples"],
  Time: ["timing/step", "timing/wait_for_generation_buffer", "timing/policy_train", "throughput/tokens_per_second", "generate/idle_ratio", "weights/pause_seconds"],
};

const view = { smooth: 0, byTime: false, charts: new Set() };

const isThere = (name) => DATA.runs.some((run) => (run.curves.metrics[name] || []).some((value) => value != null));

function smoothed(values) {
  let kept = null;
  return values.map((value) => {
    if (value == null) return null;
    kept = kept == null ? value : view.smooth * kept + (1 - view.smooth) * value;
    return kept;
  });
}

/** Return uPlot's data: one axis for all runs, and per run its values, and below them the raw ones where they are smoothed. */
function chartData(name) {
  const points = DATA.runs.map((run) => {
    const axis = view.byTime ? run.curves.seconds : run.curves.steps, values = run.curves.metrics[name] || [];
    return axis.map((at, place) => [at, values[place]]).filter(([, value]) => value != null);
  });
  const axis = [...new Set(points.flat().map(([at]) => at))].sort((left, right) => left - right);
  const columns = points.map((own) => {
    const known = new Map(own);
    return axis.map((at) => (known.has(at) ? known.get(at) : null));
  });
  return [axis, ...columns.map(smoothed), ...(view.smooth ? columns : [])];
}

function chartOptions(name, width) {
  const grid = { stroke: style("--line"), width: 1 }, axis = { stroke: style("--faint"), grid, ticks: grid, font: "11px system-ui" };
  const many = DATA.runs.length > 1;
  const series = DATA.runs.map((run, at) => ({
    label: many ? run.name : "value", stroke: colour(at), width: 1.6, spanGaps: true, value: (_, value) => number(value),
    points: { show: (plot) => plot.data[at + 1].filter((value) => value != null).length < 15, size: 4 },
  }));
  const raw = view.smooth ? DATA.runs.map((run, at) => ({ label: many ? `${run.name}, raw` : "raw", stroke: `${colour(at)}55`, width: 1, spanGaps: true, points: { show: false }, value: (_, value) => number(value) })) : [];
  return {
    width, height: 190, cursor: { sync: { key: "curves" }, points: { size: 5 } }, legend: { show: true },
    scales: { x: { time: false } },
    series: [{ label: view.byTime ? "time" : "step", value: (_, value) => (value == null ? "–" : view.byTime ? duration(value) : String(value)) }, ...series, ...raw],
    axes: [
      { ...axis, size: 28, space: 60, values: (_, found) => found.map((at) => (view.byTime ? duration(at) : at)) },
      { ...axis, size: 58, values: (_, found) => found.map(number) },
    ],
    hooks: { draw: [markAttempts] },
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

/** Return what stands above a curve: what counts as solved is behind pass@k. */
function titleOf(name) {
  const path = "generator.success_reward", values = new Set(DATA.runs.map((run) => (run.config.find(([found]) => found === path) || [path, "1.0"])[1]));
  return /pass_at_\d+$/.test(name) ? `${name} (reward ≥ ${[...values].join(" / ")}, or success)` : name;
}

function chart(name, title = titleOf(name)) {
  const box = el("div", { class: "chart", role: "figure", "aria-label": `curve of ${title}` }, el("h4", {}, title));
  let plot = null;
  box.draw = () => {
    seen.unobserve(box);
    plot?.destroy();
    plot = new uPlot(chartOptions(name, Math.max(200, box.clientWidth - 18)), chartData(name), box);
    view.charts.add(box);
  };
  box.update = () => {
    const { min, max } = plot.scales.x, axis = plot.data[0], zoomed = min > axis[0] || max < axis.at(-1);
    plot.setData(chartData(name), !zoomed);
    if (zoomed) plot.redraw();
  };
  onWidth(box, (width) => plot?.setSize({ width: Math.max(200, width - 18), height: 190 }));
  seen.observe(box);
  return box;
}

const redraw = () => view.charts.forEach((box) => box.isConnected && box.draw());

function curvesSection() {
  const shown = el("div"), key = new Set(Object.values(KEY_CHARTS).flat());
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves.metrics)))].filter(isThere).sort();
  const draw = (filter) => {
    view.charts.clear();
    if (filter) {
      const found = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
      shown.replaceChildren(found.length ? el("div", { class: "charts" }, found.slice(0, 60).map((name) => chart(name))) : el("p", { class: "faint" }, "No metric has this in its name."));
      return;
    }
    const groups = Object.entries(KEY_CHARTS).map(([title, own]) => [title, own.filter(isThere)]).filter(([, own]) => own.length);
    const rest = grouped(names.filter((name) => !key.has(name)));
    shown.replaceChildren(
      ...groups.map(([title, own]) => el("div", {}, el("h3", {}, title), el("div", { class: "charts" }, own.map((name) => chart(name))))),
      ...[...rest].map(([prefix, own]) => folded(`${prefix}/ (${own.length})`, () => el("div", { class: "charts" }, own.map((name) => chart(name))))),
    );
  };
  const tools = el("div", { class: "tools" },
    el("label", {}, "Find", el("input", { type: "search", placeholder: "part of a name", oninput: (event) => draw(event.target.value.trim()) })),
    el("label", {}, "Smooth", el("input", { type: "range", min: 0, max: 0.97, step: 0.01, value: 0, oninput: (event) => { view.smooth = Number(event.target.value); redraw(); } })),
    el("label", {}, "Over", el("select", { onchange: (event) => { view.byTime = event.target.value === "time"; redraw(); } }, el("option", { value: "step" }, "steps"), el("option", { value: "time" }, "wall time"))),
  );
  const each = Math.max(...DATA.runs.map((run) => run.curves.each));
  const note = `Dashed lines: a new attempt goes on there. Drag over a chart to zoom, double-click for the whole.${each > 1 ? ` A point is the mean of up to ${each} steps.` : ""}`;
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
