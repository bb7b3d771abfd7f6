// A page that is served asks now and then for what is new.

const EVERY_MS = 5000;
const token = new URLSearchParams(location.search).get("token");

async function newest(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

/** Take in newer content: what a person has chosen on the page stays. */
function takeIn(runs, withSamples) {
  const names = () => JSON.stringify(DATA.runs.map((run) => Object.keys(run.curves.metrics).map((name) => [name, new Set(known(run, name)).size > 1])));
  const before = names();
  runs.forEach((run, at) => Object.assign(DATA.runs[at], run, withSamples ? {} : { samples: DATA.runs[at].samples }));
  const again = ["overview", "environment", ...(names() === before ? [] : ["curves"]), ...(withSamples ? ["samples"] : [])];
  for (const name of again) {
    const section = document.getElementById(name);
    if (!section.contains(document.activeElement) || name === "samples") fill(section, name);
  }
  view.charts.forEach((box) => box.isConnected && box.update());
  document.dispatchEvent(new Event("newer"));
}

async function follow(status) {
  try {
    if (!document.hidden) takeIn(await newest("content"), false);
    status.textContent = `live, ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    status.textContent = `no answer: ${error.message}`;
  }
  setTimeout(follow, EVERY_MS, status);
}

function startLive() {
  const status = el("span", { class: "faint", role: "status" }, "live");
  const button = el("button", { onclick: async () => takeIn(await newest("content?samples=1"), true) }, "Newest samples");
  document.querySelector("header").append(el("div", { class: "tools live" }, status, button));
  setTimeout(follow, EVERY_MS, status);
}

if (DATA.live) startLive();
