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
    const trained = row.mask[at] === "1", classes = `${policy || trained ? "policy" : "context"}${policy && !trained ? " untrained" : ""}`;
    if (row.roles[at]) box.append(el("i", { class: "reward" }, `as ${row.roles[at]}`));
    const masked = name === "mask" && trained ? "background:rgba(46, 158, 104, .35)" : "";
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

const said = (facts) => Object.entries(facts).map(([fact, value]) => `${fact} ${number(value)}`);
const pictures = (found) => found.map(([what, url]) => el("img", { src: url, class: "picture", alt: what, title: what }));

function sampleBox(sample, name) {
  const title = sample.answer || (sample.reward == null ? null : `reward ${number(sample.reward)}`), colours = sample.rows ? tokenColours(name, sample.rows) : null;
  const head = el("div", { class: "head" }, title ? el("b", {}, title) : null, el("small", { class: "faint" }, [sample.name, ...(sample.stop ? [`ended by ${sample.stop}`] : []), ...said(sample.facts)].join(" · ")));
  const parts = sample.parts ? sample.parts.map((part) => el("div", { class: `part ${part.by}` }, sample.parts.length > 1 ? el("small", {}, part.role ? `${part.by} as ${part.role}` : part.by) : null, el("pre", { class: "tokens" }, part.text))) : sample.rows.map((row) => tokenRow(row, name, colours));
  return el("div", { class: "sample" }, head, pictures(sample.pictures), parts);
}

/** Make a group: its prompt and ground truth once, and its samples, the best first. */
function groupBox(group, name) {
  const title = [group.rewards ? `group ${group.name}` : group.name, group.source].join(" · ");
  return el("article", { class: "panel group" }, el("h3", {}, title), pictures(group.pictures),
    el("div", { class: "asked" },
      group.prompt ? el("div", {}, el("small", {}, "prompt"), el("pre", { class: "tokens context" }, group.prompt)) : null,
      group.truth ? el("div", {}, el("small", {}, "ground truth"), el("pre", { class: "tokens" }, group.truth)) : null),
    group.rewards?.length > 1 ? el("p", { class: "faint" }, `rewards of its ${group.rewards.length} samples: ${group.rewards.map(number).join(", ")}`) : null,
    group.samples.map((sample) => sampleBox(sample, name)));
}

function samplesSection() {
  const shown = el("div"), state = { run: 0, kind: "trained", place: -1, colour: "logprob" };
  const draw = () => {
    const samples = DATA.runs[state.run].samples, sets = samples ? samples[state.kind] : [];
    if (!samples || (!samples.trained.length && !samples.evaluated.length)) return shown.replaceChildren(el("p", { class: "faint" }, "No samples of this run are there any more, or none yet."));
    const place = state.place < 0 ? sets.length - 1 : Math.min(state.place, sets.length - 1), groups = sets[place]?.groups || [];
    const kinds = [["trained", "trained by a step"], ["evaluated", "of an evaluation"]].filter(([kind]) => samples[kind].length);
    const there = new Set(groups.flatMap((group) => group.samples.flatMap((sample) => sample.rows?.flatMap((row) => Object.keys(row.columns)) || [])));
    const go = (by) => { state.place = Math.min(Math.max(place + by, 0), sets.length - 1); draw(); };
    const tools = el("div", { class: "tools" },
      el("label", {}, "Samples", el("select", { onchange: (event) => { state.kind = event.target.value; state.place = -1; draw(); } }, kinds.map(([kind, title]) => el("option", { value: kind, selected: kind === state.kind }, title)))),
      el("button", { "aria-label": "earlier", disabled: place <= 0, onclick: () => go(-1) }, "←"),
      el("label", {}, state.kind === "trained" ? "Step" : "Version", el("select", { onchange: (event) => { state.place = Number(event.target.value); draw(); } }, sets.map((one, at) => el("option", { value: at, selected: at === place }, one.step)))),
      el("button", { "aria-label": "later", disabled: place >= sets.length - 1, onclick: () => go(1) }, "→"),
      there.size ? el("label", {}, "Colour", el("select", { onchange: (event) => { state.colour = event.target.value; draw(); } }, [...there, "mask", "none"].map((name) => el("option", { value: name, selected: name === state.colour }, SCALES[name]?.title || name)))) : null,
      there.size && SCALES[state.colour] ? scaleLegend(state.colour) : null);
    const missing = there.size && !there.has("advantage") ? "Advantages, entropies, and how far engine and trainer are apart, are there with trainer.dump_data_batch = true." : "";
    return shown.replaceChildren(tools, el("p", { class: "faint" }, [samples.note, missing].filter(Boolean).join(" ")), ...groups.map((group) => groupBox(group, state.colour)));
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
