// The sections of the page.

const MARKS = { good: "✓", look: "!", bad: "✗" };

function overviewSection() {
  const many = DATA.runs.length > 1;
  const verdicts = DATA.runs.map((run, at) => el("div", { class: "panel" }, el("h3", {}, dot(at), verdictTitle(run)),
    el("ul", { class: "findings" }, run.findings.map((one) => el("li", {}, el("span", { class: one.status, role: "img", "aria-label": one.status }, MARKS[one.status]), el("b", {}, one.name), el("span", {}, one.text))))));
  const attempts = DATA.runs.map((run, at) => el("div", { class: "panel" }, el("h3", {}, dot(at), many ? `Attempts of ${run.name}` : "Attempts"), attemptsTable(run)));
  const nodes = DATA.runs.map((run, at) => goodputBox(run, at, many)).filter(Boolean);
  const top = many ? [sideBySide((run) => [...run.about, ...run.summary])] : [factsList(DATA.runs[0]), el("div", { class: "cards" }, DATA.runs[0].cards.map((card) => cardBox(DATA.runs[0], card)))];
  return [...top, el("div", { class: "runs" }, verdicts), el("div", { class: "runs" }, nodes), el("div", { class: "runs" }, attempts)];
}

/** Show what the nodes of a run did: a bar, and its parts in words. */
function goodputBox(run, at, many) {
  if (!run.goodput) return null;
  const share = (part) => `${(100 * part).toFixed(1)} %`, { total, node_time, queued, uses } = run.goodput;
  const words = uses.map(([name, part, parts]) => el("li", {}, el("i", { class: "dot", style: `background:${USE_COLOURS[name]}` }), el("b", {}, name), el("span", {}, ` ${share(part)}`, parts.length ? `: ${parts.map(([what, own]) => `${what} ${share(own)}`).join(", ")}` : "")));
  return el("div", { class: "panel" }, el("h3", {}, dot(at), `${many ? `Nodes of ${run.name}` : "What the nodes did"}: goodput ${share(total)}`),
    el("div", { class: "uses", "aria-hidden": "true" }, uses.map(([name, part]) => el("i", { style: `flex-grow:${part};background:${USE_COLOURS[name]}` }))),
    el("ul", { class: "findings" }, words), el("p", { class: "faint" }, `${node_time} in all${queued >= 1 ? `, and ${duration(queued)} in the queue` : ""}`));
}

function factsList(run) {
  const facts = [...run.about, ...(run.started ? [["started", when(run.started)]] : [])];
  return el("dl", { class: "facts" }, facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
}

function cardBox(run, card) {
  return el("div", { class: "panel card" }, el("h3", {}, card.title), el("b", { class: card.status || null }, card.status ? `${MARKS[card.status]} ` : "", card.value), sparkline(known(run, card.metric)), el("p", {}, card.note));
}

/** Draw a small curve without axes; null where there are too few values for one. */
function sparkline(values) {
  if (values.length < 2) return null;
  const low = Math.min(...values), high = Math.max(...values), last = values.length - 1;
  const points = values.map((value, at) => `${(100 * at / last).toFixed(1)},${(29 - 28 * (high > low ? (value - low) / (high - low) : 0.5)).toFixed(1)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "polyline");
  for (const [name, value] of [["viewBox", "0 0 100 30"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

/** Make a table with a column for each run, of what `rows` returns of it: names and texts. */
function sideBySide(rows) {
  const own = DATA.runs.map((run) => new Map(rows(run))), names = [...new Set(own.flatMap((known) => [...known.keys()]))];
  const head = DATA.runs.length > 1 ? el("thead", {}, el("tr", {}, el("td"), DATA.runs.map((run, at) => el("th", { scope: "col" }, dot(at), run.name)))) : null;
  return el("div", { class: "scroll" }, el("table", {}, head, el("tbody", {}, names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), own.map((known) => el("td", {}, known.get(name) || "–")))))));
}

function verdictTitle(run) {
  const count = (status) => run.findings.filter((one) => one.status === status).length, bad = count("bad"), look = count("look");
  const said = [bad ? `${bad} wrong` : "", look ? `${look} to look at` : ""].filter(Boolean).join(", ") || (run.findings.length ? "healthy" : "nothing reported yet");
  return `${DATA.runs.length > 1 ? run.name : "Verdict"}: ${said}`;
}

function attemptsTable(run) {
  return table(["attempt", "began", "took", "ended", "went on after", "nodes"], run.attempts.map((one) => [
    one.number, when(run.started + one.start), one.end == null ? "–" : duration(one.end - one.start),
    el("span", {}, el("i", { class: "dot", style: `background:${outcomeColour(one.kind)}` }), one.kind, one.message && one.message !== "finished" ? `: ${one.message}` : ""),
    one.after == null ? "–" : one.after ? `step ${one.after}` : "the beginning", one.hosts.join(", ")]));
}

function configSection() {
  const tables = DATA.runs.map((run) => new Map(run.config.map(([path, value, changed]) => [path, { value, changed }])));
  const paths = [...new Set(DATA.runs.flatMap((run) => run.config.map(([path]) => path)))];
  const many = DATA.runs.length > 1, body = el("tbody"), state = { only: true, find: "" };
  const differs = (path) => new Set(tables.map((own) => own.get(path)?.value)).size > 1;
  const isShown = (path) => (!state.only || (many ? differs(path) : tables[0].get(path).changed)) && path.includes(state.find);
  const draw = () => {
    const shown = paths.filter(isShown);
    body.replaceChildren(...shown.map((path) => el("tr", { class: (many ? differs(path) : tables[0].get(path).changed) ? "changed" : "" }, el("td", {}, el("code", {}, path)), tables.map((own) => el("td", {}, el("code", {}, own.get(path)?.value ?? "–"))))));
    if (!shown.length) body.append(el("tr", {}, el("td", { class: "faint" }, many ? "No settings differ." : "No such settings.")));
  };
  const tools = el("div", { class: "tools" },
    el("label", {}, el("input", { type: "checkbox", checked: true, onchange: (event) => { state.only = event.target.checked; draw(); } }), many ? "only what differs" : "only what is not a default"),
    el("label", {}, "Find", el("input", { type: "search", placeholder: "part of a path", oninput: (event) => { state.find = event.target.value.trim(); draw(); } })));
  draw();
  return [tools, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), DATA.runs.map((run, at) => el("th", { scope: "col" }, dot(at), many ? run.name : "value")))), body))];
}

function environmentSection() {
  return [sideBySide((run) => run.environment), el("p", { class: "faint" }, `Made ${when(Math.max(...DATA.runs.map((run) => run.made)))} from the files of the runs.`)];
}

const SECTIONS = {
  overview: ["Overview", overviewSection], curves: ["Curves", curvesSection], timeline: ["Timeline", timelineSection],
  samples: ["Samples", samplesSection], groups: ["Rewards and lengths", groupsSection], configuration: ["Configuration", configSection],
  environment: ["Environment", environmentSection],
};

function fill(section, name) {
  const [title, build] = SECTIONS[name];
  section.replaceChildren(el("h2", {}, title), ...build().filter(Boolean));
}

function drawPage() {
  const main = document.querySelector("main"), nav = document.querySelector("nav");
  for (const [name, [title]] of Object.entries(SECTIONS)) {
    nav.append(el("a", { href: `#${name}` }, title));
    const section = el("section", { id: name, "aria-label": title });
    fill(section, name);
    main.append(section);
  }
  const inSight = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) nav.querySelectorAll("a").forEach((link) => (link.hash === `#${entry.target.id}` ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }, { rootMargin: "-20% 0px -75% 0px" });
  main.querySelectorAll("section").forEach((section) => inSight.observe(section));
}

drawPage();
