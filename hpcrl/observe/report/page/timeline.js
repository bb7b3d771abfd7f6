// What every process did over wall time: a row each, from the whole run down to a step.

const ROW = 22, GAP = 6, RULER = 38, NAMES = 96;

/** Return starts (ms) and kinds of a process's spans, and the end of the last one. */
function unpacked(process) {
  const count = process.spans.length / 2, starts = new Float64Array(count + 1), kinds = new Uint8Array(count);
  let at = process.start;
  for (let place = 0; place < count; place += 1) {
    starts[place] = at;
    kinds[place] = process.spans[2 * place];
    at += process.spans[2 * place + 1];
  }
  starts[count] = at;
  return { starts, kinds, count };
}

/** Return the place of the last span that begins at or before a time. */
function placeOf(spans, time) {
  let low = 0, high = spans.count;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (spans.starts[middle] <= time) low = middle; else high = middle;
  }
  return low;
}

const percent = (share) => (share < 5e-4 ? "" : `${(100 * share).toFixed(1)} %`);

class TimelineView {
  constructor(run) {
    const { timeline } = run;
    this.run = run;
    this.kinds = timeline.kinds;
    this.rows = Object.entries(timeline.processes).map(([name, process]) => ({ name, resolution: process.resolution, spans: unpacked(process) }));
    this.steps = timeline.steps;
    this.low = Math.min(...this.rows.map((row) => row.spans.starts[0]));
    this.high = Math.max(...this.rows.map((row) => row.spans.starts[row.spans.count]));
    [this.from, this.to] = [this.low, this.high];
    this.height = RULER + this.rows.length * (ROW + GAP) + 4;
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "timeline of all processes; plus and minus zoom, arrows move, Home shows the whole" });
    this.box = el("div", { class: "timeline" }, this.canvas);
    this.shares = el("div", { class: "scroll shares" });
    this.listen();
    onWidth(this.box, (width) => { this.width = width; this.draw(); });
  }

  listen() {
    const { canvas } = this;
    let grabbed = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaY) < Math.abs(event.deltaX)) return this.move(event, event.deltaX / this.width);
      event.preventDefault();
      return this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { grabbed = { x: event.offsetX, from: this.from, to: this.to }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { grabbed = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (!grabbed) return this.tell(event);
      const by = (grabbed.x - event.offsetX) / (this.width - NAMES) * (grabbed.to - grabbed.from);
      return this.show(grabbed.from + by, grabbed.to + by);
    });
    canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
    canvas.addEventListener("dblclick", (event) => this.showStep(this.stepAt(this.timeAt(event.offsetX))));
    canvas.addEventListener("keydown", (event) => {
      const part = (this.to - this.from) / 5, middle = (this.from + this.to) / 2;
      const acts = { "+": () => this.zoom(0.7, middle), "=": () => this.zoom(0.7, middle), "-": () => this.zoom(1.4, middle), ArrowLeft: () => this.show(this.from - part, this.to - part), ArrowRight: () => this.show(this.from + part, this.to + part), Home: () => this.show(this.low, this.high) };
      if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
    });
  }

  timeAt(x) { return this.from + (x - NAMES) / (this.width - NAMES) * (this.to - this.from); }
  xOf(time) { return NAMES + (time - this.from) / (this.to - this.from) * (this.width - NAMES); }
  stepAt(time) { return this.steps.find(([, start, end]) => start <= time && time < end); }
  zoom(factor, around) { this.show(around - (around - this.from) * factor, around + (this.to - around) * factor); }
  move(event, share) { event.preventDefault(); const by = share * (this.to - this.from); this.show(this.from + by, this.to + by); }

  showStep(step) {
    if (!step) return;
    const margin = 0.03 * (step[2] - step[1]);
    this.show(step[1] - margin, step[2] + margin);
  }

  show(from, to) {
    const wide = Math.min(Math.max(to - from, 5), this.high - this.low);
    const begin = Math.min(Math.max(from, this.low), this.high - wide);
    [this.from, this.to] = [begin, begin + wide];
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  tell(event) {
    const time = this.timeAt(event.offsetX), row = this.rows[Math.floor((event.offsetY - RULER) / (ROW + GAP))];
    if (!row || event.offsetX < NAMES) return showTip(event, row ? row.name : "");
    const { spans } = row, place = placeOf(spans, time), step = this.stepAt(time);
    if (time < spans.starts[0] || time > spans.starts[spans.count]) return showTip(event, `${row.name}: absent`);
    const lasted = (spans.starts[place + 1] - spans.starts[place]) / 1000;
    return showTip(event, `${row.name}: ${this.kinds[spans.kinds[place]]}, ${duration(lasted)}${step ? `\nstep ${step[0]}` : ""}\n${duration(time / 1000)} after the start`);
  }

  draw() {
    const context = prepared(this.canvas, this.width, this.height);
    this.ruler(context);
    const sums = this.rows.map((row, at) => this.row(context, row, RULER + at * (ROW + GAP)));
    this.tellShares(sums);
    const wide = duration((this.to - this.from) / 1000), first = this.stepAt(this.from + 1), last = this.stepAt(this.to - 1);
    this.canvas.dispatchEvent(new CustomEvent("shown", { detail: `${wide}${first && last ? `, steps ${first[0]} to ${last[0]}` : ""}` }));
  }

  ruler(context) {
    context.font = "11px system-ui";
    context.textAlign = "center";
    context.fillStyle = style("--faint");
    context.strokeStyle = style("--line");
    for (const seconds of ticks(this.from / 1000, this.to / 1000, Math.max(2, this.width / 110))) {
      const x = this.xOf(1000 * seconds);
      context.fillText(duration(seconds), Math.min(Math.max(x, NAMES + 16), this.width - 18), 12);
      context.beginPath();
      context.moveTo(x, 16);
      context.lineTo(x, this.height);
      context.stroke();
    }
    let free = NAMES;
    for (const [step, start, end] of this.steps) {
      const x = this.xOf(start), until = this.xOf(end);
      if (until < NAMES || x > this.width || x < free) continue;
      context.fillText(step, Math.min((x + Math.max(until, x)) / 2, this.width - 12), 30);
      free = x + Math.max(34, until - x);
      context.fillRect(x, 20, 1, 14);
    }
    for (const attempt of this.run.attempts.slice(1)) {
      const x = this.xOf(1000 * attempt.start), before = this.run.attempts[this.run.attempts.indexOf(attempt) - 1];
      if (x < NAMES || x > this.width) continue;
      context.fillStyle = outcomeColour(before.kind);
      context.fillRect(x - 1, 16, 2, this.height);
      context.textAlign = "left";
      const text = `attempt ${attempt.number}`, left = Math.min(x + 4, this.width - 60);
      context.fillStyle = style("--panel");
      context.fillRect(left - 2, 2, context.measureText(text).width + 4, 13);
      context.fillStyle = outcomeColour(before.kind);
      context.fillText(text, left, 12);
    }
  }

  /** Draw a row: in each column of pixels every kind with its share of the time; return the milliseconds of each kind. */
  row(context, { name, spans }, top) {
    const begin = NAMES, columns = Math.max(1, this.width - begin), scale = columns / (this.to - this.from), kinds = this.kinds.length;
    const parts = new Float32Array(columns * kinds), sums = new Float64Array(kinds);
    for (let place = placeOf(spans, this.from); place < spans.count && spans.starts[place] < this.to; place += 1) {
      const start = Math.max(spans.starts[place], this.from), end = Math.min(spans.starts[place + 1], this.to), kind = spans.kinds[place];
      if (end <= start) continue;
      sums[kind] += end - start;
      const left = (start - this.from) * scale, right = (end - this.from) * scale;
      for (let column = Math.floor(left); column < Math.min(right, columns); column += 1) parts[column * kinds + kind] += Math.min(right, column + 1) - Math.max(left, column);
    }
    context.textAlign = "left";
    context.fillStyle = style("--text");
    context.font = "12px system-ui";
    context.fillText(name, 6, top + 15, begin - 10);
    context.fillStyle = style("--back");
    context.fillRect(begin, top, columns, ROW);
    for (let column = 0; column < columns; column += 1) {
      let y = top;
      for (let kind = 0; kind < kinds; kind += 1) {
        const tall = parts[column * kinds + kind] * ROW;
        if (tall < 0.05) continue;
        context.fillStyle = KIND_COLOURS[this.kinds[kind]];
        context.fillRect(begin + column, y, 1, tall);
        y += tall;
      }
    }
    return sums;
  }

  tellShares(sums) {
    const used = this.kinds.map((_, kind) => kind).filter((kind) => sums.some((own) => own[kind] > 0) && this.kinds[kind] !== "absent");
    const whole = this.to - this.from;
    this.shares.replaceChildren(table(["process", ...used.map((kind) => this.kinds[kind]), "absent"], this.rows.map((row, at) => {
      const there = used.reduce((sum, kind) => sum + sums[at][kind], 0);
      return [row.name, ...used.map((kind) => percent(sums[at][kind] / whole)), percent(Math.max(0, 1 - there / whole))];
    }), ""));
  }
}

function timelineSection() {
  const shown = el("div");
  let chosen = 0, last = null;
  document.addEventListener("newer", () => {
    const zoomed = last && (last.from > last.low || last.to < last.high) ? [last.from, last.to] : null;
    show(chosen);
    if (zoomed && last) last.show(...zoomed);
  });
  const show = (at) => {
    chosen = at;
    last = null;
    const run = DATA.runs[at];
    if (!run.timeline) return shown.replaceChildren(el("p", { class: "faint" }, "This run has no timeline: an earlier hpcrl made it, or none of its processes has begun."));
    const view = new TimelineView(run), range = el("span", { class: "faint", "aria-live": "polite" });
    last = view;
    view.canvas.addEventListener("shown", (event) => { range.textContent = event.detail; });
    const steps = el("select", { "aria-label": "step", onchange: (event) => view.showStep(view.steps.find(([step]) => String(step) === event.target.value)) },
      el("option", { value: "" }, "choose"), view.steps.map(([step]) => el("option", { value: step }, step)));
    const tools = el("div", { class: "tools" },
      el("button", { onclick: () => { steps.value = ""; view.show(view.low, view.high); } }, "Whole run"), el("label", {}, "Step", steps),
      el("button", { "aria-label": "zoom in", onclick: () => view.zoom(0.5, (view.from + view.to) / 2) }, "+"), el("button", { "aria-label": "zoom out", onclick: () => view.zoom(2, (view.from + view.to) / 2) }, "−"), range);
    const used = new Set(view.rows.flatMap((row) => [...new Set(row.spans.kinds)]));
    const legend = el("div", { class: "legend" }, [...used].sort().filter((kind) => view.kinds[kind] !== "absent").map((kind) => el("span", {}, el("i", { style: `background:${KIND_COLOURS[view.kinds[kind]]}` }), view.kinds[kind])));
    const coarse = view.rows.filter((row) => row.resolution).map((row) => row.resolution);
    return shown.replaceChildren(tools, view.box, legend,
      el("p", { class: "faint" }, `Wheel or + and − zoom, dragging or arrows move, a double click shows a step.${coarse.length ? ` Of long timelines spans within ${duration(Math.max(...coarse))} are put together; the shares are exact.` : ""}`),
      el("h3", {}, "Shares of the time that is shown"), view.shares);
  };
  show(0);
  return [runPicker(show), shown];
}
