// The sections of the page.

const MARKS = { good: "✓", look: "!", bad: "✗" };

function overviewSection() {
  const names = [...new Set(DATA.runs.flatMap((run) => run.summary.map(([name]) => name)))];
  const summaries = DATA.runs.map((run) => new Map(run.summary));
  const head = DATA.runs.length > 1 ? el("thead", {}, el("tr", {}, el("th", {}), DATA.runs.map((run, at) => el("th", { scope: "col" }, dot(at), run.name)))) : null;
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), summaries.map((own) => el("td", {}, own.get(name) || "–"))));
  const verdicts = DATA.runs.map((run, at) => el("div", { class: "panel" }, el("h3", {}, dot(at), verdictTitle(run)),
    el("ul", { class: "findings" }, run.findings.map((one) => el("li", {}, el("span", { class: one.status, "aria-label": one.status }, MARKS[one.status]), el("b", {}, one.name), el("span", {}, one.text))))));
  const attempts = DATA.runs.map((run, at) => el("div", { class: "panel scroll" }, el("h3", {}, dot(at), DATA.runs.length > 1 ? `Attempts of ${run.name}` : "Attempts"), attemptsTable(run)));
  return [el("div", { class: "scroll" }, el("table", {}, head, el("tbody", {}, rows))), el("h3", {}, "Verdict"), el("div", { class: "runs" }, verdicts), el("h3", {}, "Attempts"), el("div", { class: "runs" }, attempts)];
}

function verdictTitle(run) {
  const count = (status) => run.findings.filter((one) => one.status === status).length, bad = count("bad"), look = count("look");
  const said = bad ? `${bad} wrong` : look ? `${look} to look at` : run.findings.length ? "healthy" : "nothing reported yet";
  return DATA.runs.length > 1 ? `${run.name}: ${said}` : said[0].toUpperCase() + said.slice(1);
}

function attemptsTable(run) {
  return table(["", "began", "took", "ended", "went on after", "nodes"], run.attempts.map((one) => [
    one.number, new Date(1000 * (run.started + one.start)).toLocaleString(), one.end == null ? "–" : duration(one.end - one.start),
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
  const names = [...new Set(DATA.runs.flatMap((run) => run.environment.map(([name]) => name)))];
  const known = DATA.runs.map((run) => new Map(run.environment));
  return [el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), known.map((own) => el("td", {}, own.get(name) || "–"))))))),
    el("p", { class: "faint" }, `Made ${new Date(1000 * Math.max(...DATA.runs.map((run) => run.made))).toLocaleString()} from the files of the runs.`)];
}

const SECTIONS = {
  overview: ["Overview", overviewSection], curves: ["Curves", curvesSection], timeline: ["Timeline", timelineSection],
  samples: ["Samples", samplesSection], groups: ["Rewards and lengths", groupsSection], configuration: ["Configuration", configSection],
  environment: ["Environment", environmentSection],
};

function drawPage() {
  const main = document.querySelector("main"), nav = document.querySelector("nav");
  for (const [name, [title, build]] of Object.entries(SECTIONS)) {
    nav.append(el("a", { href: `#${name}` }, title));
    main.append(el("section", { id: name, "aria-label": title }, el("h2", {}, title), ...build().filter(Boolean)));
  }
  const inSight = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) nav.querySelectorAll("a").forEach((link) => (link.hash === `#${entry.target.id}` ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }, { rootMargin: "-20% 0px -75% 0px" });
  main.querySelectorAll("section").forEach((section) => inSight.observe(section));
}

drawPage();
