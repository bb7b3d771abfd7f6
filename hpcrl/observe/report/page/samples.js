// Samples: what was said, and what is known of each token, as its colour.

const SCALES = {
  logprob: { title: "log-probability", of: (value) => Math.min(1, -value / 6), hue: "217, 79, 79", ends: ["certain", "unlikely: -6 nats"] },
  entropy: { title: "entropy", of: (value) => Math.min(1, value / 3), hue: "138, 84, 204", ends: ["certain", "3 nats"] },
  advantage: { title: "advantage", signed: true, ends: ["negative", "positive"] },
  mismatch: { title: "mismatch: log-probability, trainer minus engine", signed: true, ends: ["engine higher", "trainer higher"] },
  version: { title: "version of the policy", ends: ["oldest", "newest"] },
};

/** Return what turns a value into a colour, for the values of one sample. */
function tokenColours(name, rows) {
  const scale = SCALES[name], values = rows.flatMap((row) => row.columns[name] || []).filter((value) => value != null);
  if (!scale || !values.length) return null;
  if (scale.of) return (value) => `rgba(${scale.hue}, ${0.75 * scale.of(value)})`;
  const largest = Math.max(...values.map(Math.abs)) || 1, least = Math.min(...values), greatest = Math.max(...values);
  if (scale.signed) return (value) => (value >= 0 ? `rgba(46, 158, 104, ${0.8 * value / largest})` : `rgba(217, 79, 79, ${-0.8 * value / largest})`);
  return (value) => `rgba(59, 111, 216, ${0.15 + 0.6 * (greatest === least ? 0 : (value - least) / (greatest - least))})`;
}

function tokenRow(row, name, colours) {
  const box = el("pre", { class: "tokens", tabindex: 0 });
  row.text.forEach((text, at) => {
    const policy = row.by[at] === "p", value = row.columns[name]?.[at];
    const classes = `${policy ? "policy" : "context"}${policy && row.mask[at] === "0" ? " untrained" : ""}`;
    const masked = name === "mask" && row.mask[at] === "1" ? "background:rgba(46, 158, 104, .35)" : "";
    const token = el("span", { class: classes, style: colours && value != null ? `background:${colours(value)}` : masked }, text.replaceAll("\n", "⏎\n"));
    token.dataset.at = at;
    box.append(token);
    if (row.rewards[at] != null) box.append(el("i", { class: "reward" }, `reward ${number(row.rewards[at])}`));
  });
  if (row.left_out) box.append(el("i", { class: "reward" }, `${row.left_out} more tokens`));
  box.addEventListener("pointermove", (event) => {
    const at = event.target.dataset?.at;
    if (at == null) return showTip(event, "");
    const known = Object.entries(row.columns).filter(([, values]) => values[at] != null).map(([column, values]) => `${SCALES[column].title}: ${number(values[at])}`);
    return showTip(event, [`token ${Number(at) + 1}: ${JSON.stringify(row.text[at])}`, row.by[at] === "p" ? `chosen by the policy, ${row.mask[at] === "1" ? "trained" : "not trained"}` : "prompt or environment", ...known].join("\n"));
  });
  box.addEventListener("pointerleave", (event) => showTip(event, ""));
  return box;
}

function sampleBox(sample, name) {
  const facts = Object.entries(sample.facts).map(([fact, value]) => `${fact} ${number(value)}`);
  const head = el("header", {}, el("b", {}, `${sample.name} · reward ${number(sample.reward)}`), el("div", { class: "faint" }, [`ended by ${sample.stop}`, `source ${sample.source}`, ...facts].join(" · ")));
  if (sample.group) head.append(el("div", { class: "faint" }, `rewards of its group: ${sample.group.map(number).join(", ")}`));
  const pictures = sample.pictures.map(([what, url]) => el("img", { src: url, class: "picture", alt: what, title: what }));
  if (sample.parts) return el("article", { class: "panel sample" }, head, pictures, sample.parts.map((part) => el("div", { class: `part ${part.by}` }, el("small", {}, part.by), el("pre", { class: "tokens" }, part.text))));
  const colours = tokenColours(name, sample.rows);
  return el("article", { class: "panel sample" }, head, pictures, sample.rows.map((row) => tokenRow(row, name, colours)));
}

function samplesSection() {
  const shown = el("div"), state = { run: 0, kind: "trained", place: -1, colour: "logprob", order: "as they are" };
  const draw = () => {
    const samples = DATA.runs[state.run].samples, sets = samples ? samples[state.kind] : [];
    if (!samples || (!samples.trained.length && !samples.evaluated.length)) return shown.replaceChildren(el("p", { class: "faint" }, "No samples of this run are there any more, or none yet."));
    const place = state.place < 0 ? sets.length - 1 : Math.min(state.place, sets.length - 1), set = sets[place];
    const kinds = [["trained", "trained by a step"], ["evaluated", "of an evaluation"]].filter(([kind]) => samples[kind].length);
    const there = new Set((set?.samples || []).flatMap((sample) => sample.rows?.flatMap((row) => Object.keys(row.columns)) || []));
    const go = (by) => { state.place = Math.min(Math.max(place + by, 0), sets.length - 1); draw(); };
    const tools = el("div", { class: "tools" },
      el("label", {}, "Samples", el("select", { onchange: (event) => { state.kind = event.target.value; state.place = -1; draw(); } }, kinds.map(([kind, title]) => el("option", { value: kind, selected: kind === state.kind }, title)))),
      el("button", { "aria-label": "earlier", disabled: place <= 0, onclick: () => go(-1) }, "←"),
      el("label", {}, state.kind === "trained" ? "Step" : "Version", el("select", { onchange: (event) => { state.place = Number(event.target.value); draw(); } }, sets.map((one, at) => el("option", { value: at, selected: at === place }, one.step)))),
      el("button", { "aria-label": "later", disabled: place >= sets.length - 1, onclick: () => go(1) }, "→"),
      el("label", {}, "Order", el("select", { onchange: (event) => { state.order = event.target.value; draw(); } }, ["as they are", "best first", "worst first"].map((order) => el("option", { selected: order === state.order }, order)))),
      there.size ? el("label", {}, "Colour", el("select", { onchange: (event) => { state.colour = event.target.value; draw(); } }, [...there, "mask", "none"].map((name) => el("option", { value: name, selected: name === state.colour }, SCALES[name]?.title || name)))) : null,
      there.size && SCALES[state.colour] ? scaleLegend(state.colour) : null);
    const sign = { "best first": -1, "worst first": 1 }[state.order] || 0;
    const ordered = [...(set?.samples || [])].sort((left, right) => sign * (left.reward - right.reward));
    const missing = there.size && !there.has("advantage") ? "Advantages, entropies, and how far engine and trainer are apart, are there with trainer.dump_data_batch = true." : "";
    return shown.replaceChildren(tools, el("p", { class: "faint" }, [samples.note, missing].filter(Boolean).join(" ")), ...ordered.map((sample) => sampleBox(sample, state.colour)));
  };
  if (!DATA.runs[0].samples?.trained.length) state.kind = "evaluated";
  draw();
  return [runPicker((at) => { Object.assign(state, { run: at, place: -1, kind: DATA.runs[at].samples?.trained.length ? "trained" : "evaluated" }); draw(); }), shown];
}

function scaleLegend(name) {
  const scale = SCALES[name], [low, high] = scale.ends;
  const back = scale.of ? `linear-gradient(90deg, transparent, rgba(${scale.hue}, .75))` : scale.signed ? "linear-gradient(90deg, rgba(217,79,79,.8), transparent, rgba(46,158,104,.8))" : "linear-gradient(90deg, rgba(59,111,216,.15), rgba(59,111,216,.75))";
  return el("span", { class: "scale" }, low, el("i", { style: `background:${back}` }), high);
}
