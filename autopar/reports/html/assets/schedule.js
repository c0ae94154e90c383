// The schedule: every pipeline rank's actions on a time axis, down to one collective.
const KINDS = { F: "forward", B: "backward", I: "backward, for the input", W: "backward, for the weights" };

/** Actions and what is beside them as marks of a rank: {start, end, kind, text ...}, in order. */
function marksOf(plan, rank) {
  const { step } = plan, found = { compute: [], comm: [] };
  for (const [kind, stage, microbatch, start, length, template] of step.actions[rank]) {
    const action = { kind, stage, microbatch, start, end: start + length, rank, template };
    found.compute.push(action);
    for (const [what, from, lasts, calls, size, overlapped] of step.templates[template][3]) {
      if (lasts > 0) found.comm.push({ kind: "comm", what, start: start + from, end: start + from + lasts, calls, size, overlapped, rank, action });
    }
  }
  for (const [what, stream, start, length, calls, size] of step.once[rank]) {
    if (length <= 0) continue;
    const mark = { kind: stream === "compute" ? "once" : "comm", what, start, end: start + length, calls, size, rank, once: true };
    found[stream === "compute" ? "compute" : "comm"].push(mark);
  }
  found.compute.sort((a, b) => a.start - b.start);
  found.comm.sort((a, b) => a.start - b.start);
  return found;
}
function markName(mark, many) {
  if (mark.what) return mark.what;
  return `${many ? mark.stage : ""}${mark.kind}${mark.microbatch}`;
}
function markText(plan, mark) {
  const many = plan.step.stage_to_rank.length > plan.step.actions.length;
  const lines = [markName(mark, many)];
  if (KINDS[mark.kind]) lines[0] += `: ${KINDS[mark.kind]} of microbatch ${mark.microbatch}, stage ${mark.stage}`;
  lines.push(`pipeline rank ${mark.rank}, ${nano(mark.end - mark.start)} from ${nano(mark.start)} on`);
  if (mark.action) lines.push(`in ${markName(mark.action, true)}${mark.overlapped ? ", beside its computing" : ""}`);
  if (mark.once) lines.push("once a step");
  if (mark.calls) lines.push(`${three(mark.calls)} calls${mark.size ? `, ${bytes(mark.size)} given` : ""}`);
  return lines.join("\n");
}
/** Index of the first mark that ends after a time. */
const firstAfter = d3.bisector((m) => m.end).right;

class Gantt {
  constructor(plan, options) {
    this.plan = plan;
    this.options = options;
    this.ranks = plan.step.actions.length;
    this.total = this.end = plan.step.run.seconds * 1e9;
    this.marks = d3.range(this.ranks).map((rank) => marksOf(plan, rank));
    this.lane = this.ranks > 40 ? 12 : this.ranks > 16 ? 20 : 34;
    this.left = 52;
    this.top = 26;
    this.height = this.top + this.ranks * this.lane + 8;
    this.picked = null;
    this.transform = d3.zoomIdentity;
  }
  scale(width) {
    const base = d3.scaleLinear([0, this.total], [this.left, width - 12]);
    return this.transform.rescaleX(base);
  }
  lanes(rank) {
    const y = this.top + rank * this.lane, split = Math.round(this.lane * 0.66);
    return { y, compute: [y + 1, split - 2], comm: [y + split, this.lane - split - 2] };
  }
  colors() {
    const names = ["F", "B", "I", "W", "comm", "once", "idle", "ink", "soft", "line", "critical", "paper"];
    return Object.fromEntries(names.map((n) => [n, color(n)]));
  }
  draw(context, width) {
    const c = this.colors(), x = this.scale(width), [from, to] = [x.invert(this.left), x.invert(width - 12)];
    this.width = width;
    context.save();
    context.beginPath();
    context.rect(this.left, 0, width - 12 - this.left, this.height);
    context.clip();
    for (let rank = 0; rank < this.ranks; rank += 1) {
      const lanes = this.lanes(rank);
      if (this.options.idle) {
        context.fillStyle = c.idle;
        context.fillRect(x(Math.max(0, from)), lanes.compute[0], x(Math.min(this.end, to)) - x(Math.max(0, from)), lanes.compute[1]);
      }
      this.drawMarks(context, this.marks[rank].compute, lanes.compute, x, from, to, c, true);
      if (this.options.collectives) this.drawMarks(context, this.marks[rank].comm, lanes.comm, x, from, to, c, false);
    }
    if (this.options.messages) this.drawMessages(context, x, from, to, c);
    if (this.options.critical) this.drawCritical(context, x, c);
    if (this.picked) this.outline(context, this.picked, x, c.ink, 2);
    context.restore();
    this.drawFrame(context, width, x, c);
  }
  drawMarks(context, marks, [y, tall], x, from, to, c, named) {
    const many = this.plan.step.stage_to_rank.length > this.ranks;
    context.textBaseline = "middle";
    context.font = `${Math.min(12, tall - 1)}px system-ui, sans-serif`;
    let drawn = -Infinity;
    for (let i = firstAfter(marks, from); i < marks.length && marks[i].start < to; i += 1) {
      const mark = marks[i], x0 = x(mark.start), x1 = x(mark.end);
      if (x1 - drawn < 0.4) continue; // too narrow to be seen beside the one before
      const wide = Math.max(0.6, x1 - x0);
      context.fillStyle = c[mark.kind] || c.comm;
      context.fillRect(x0, y, wide > 3 ? wide - 0.8 : wide, tall);
      drawn = x1;
      if (named && wide > 22 && tall > 9) {
        const text = markName(mark, many);
        context.fillStyle = c.paper;
        const at = Math.max(x0, this.left) + 4;
        if (context.measureText(text).width < x1 - at - 3) context.fillText(text, at, y + tall / 2 + 0.5);
      }
    }
  }
  drawMessages(context, x, from, to, c) {
    const shown = this.plan.step.messages.filter((m) => m[6] > from && m[4] < to);
    if (shown.length > 3000) return;
    context.strokeStyle = c.soft;
    context.lineWidth = 0.8;
    context.beginPath();
    for (const [, , , source, sent, target, used] of shown) {
      const a = this.lanes(source).compute, b = this.lanes(target).compute;
      context.moveTo(x(sent), a[0] + a[1] / 2);
      context.lineTo(x(used), b[0] + b[1] / 2);
    }
    context.stroke();
  }
  drawCritical(context, x, c) {
    context.strokeStyle = c.critical;
    context.lineWidth = 2;
    context.beginPath();
    let open = false;
    for (const [rank, start, length, , message] of [...this.plan.step.critical].reverse()) {
      if (message) continue; // the line from one rank to the next is the message
      const y = this.lanes(rank).compute[0] + this.lanes(rank).compute[1] - 1;
      if (open) context.lineTo(x(start), y); else context.moveTo(x(start), y);
      context.lineTo(x(start + length), y);
      open = true;
    }
    context.stroke();
  }
  outline(context, mark, x, ink, wide) {
    const lanes = this.lanes(mark.rank), [y, tall] = mark.kind === "comm" ? lanes.comm : lanes.compute;
    context.strokeStyle = ink;
    context.lineWidth = wide;
    context.strokeRect(x(mark.start) - 1, y - 1, Math.max(2, x(mark.end) - x(mark.start)) + 1, tall + 2);
  }
  drawFrame(context, width, x, c) {
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = c.soft;
    const every = this.lane < 14 ? 4 : 1;
    for (let rank = 0; rank < this.ranks; rank += every) context.fillText(`${DATA.pipeline} ${rank}`, this.left - 8, this.top + rank * this.lane + this.lane * 0.35);
    context.textAlign = "center";
    context.strokeStyle = c.line;
    context.lineWidth = 1;
    for (const t of x.ticks(Math.max(2, width / 130))) {
      const at = x(t);
      if (at < this.left - 1 || at > width - 11) continue;
      context.fillText(t === 0 ? "0" : nano(t), Math.min(width - 34, Math.max(this.left + 14, at)), 10);
      context.beginPath();
      context.moveTo(at, 18);
      context.lineTo(at, 23);
      context.stroke();
    }
    context.textAlign = "left";
  }
  /** The mark at a place of the canvas. */
  at(px, py) {
    const rank = Math.floor((py - this.top) / this.lane);
    if (rank < 0 || rank >= this.ranks || px < this.left) return null;
    const x = this.scale(this.width), t = x.invert(px), lanes = this.lanes(rank);
    const marks = py >= lanes.comm[0] && this.options.collectives ? this.marks[rank].comm : this.marks[rank].compute;
    const mark = marks[firstAfter(marks, t)];
    return mark && mark.start <= t ? mark : null;
  }
  idleAt(px, py) {
    const rank = Math.floor((py - this.top) / this.lane);
    if (rank < 0 || rank >= this.ranks || px < this.left) return null;
    const t = this.scale(this.width).invert(px), marks = this.marks[rank].compute, i = firstAfter(marks, t);
    const from = i ? marks[i - 1].end : 0, to = i < marks.length ? marks[i].start : this.end;
    return t < 0 || t > this.end || to <= from ? null : `pipeline rank ${rank} is idle for ${nano(to - from)}`;
  }
}
/** Zooming by wheel, drag and keys; returns what zooms to an interval. */
function zoomable(gantt, drawn, changed) {
  const canvas = d3.select(drawn.canvas);
  const zoom = d3.zoom().scaleExtent([1, 1e6])
    .filter((event) => !event.button && (event.type !== "wheel" || event.ctrlKey || event.shiftKey || document.activeElement === drawn.canvas))
    .on("zoom", (event) => { gantt.transform = event.transform; drawn.paint(); changed(); });
  const fit = () => {
    const width = drawn.canvas.clientWidth, extent = [[gantt.left, 0], [width - 12, gantt.height]];
    zoom.extent(extent).translateExtent(extent);
  };
  fit();
  canvas.call(zoom).on("dblclick.zoom", null);
  addEventListener("resize", fit);
  const to = (start, end) => {
    fit();
    const width = drawn.canvas.clientWidth, base = d3.scaleLinear([0, gantt.total], [gantt.left, width - 12]);
    const room = (end - start) * 0.6 || gantt.total * 1e-6, k = Math.min(1e6, gantt.total / (end - start + 2 * room));
    const x = base(start - room);
    canvas.call(zoom.transform, d3.zoomIdentity.translate(gantt.left - k * x, 0).scale(k));
  };
  return { to, by: (k) => canvas.call(zoom.scaleBy, k), pan: (px) => canvas.call(zoom.translateBy, px / gantt.transform.k, 0), reset: () => canvas.call(zoom.transform, d3.zoomIdentity) };
}
function scheduleFacts(plan) {
  const { run, schedule } = plan.step;
  return pairs([["schedule", schedule], ["a step", num(run.seconds, seconds, "run.seconds")], ["before microbatches", num(run.before, seconds, "run.before")],
    ["with them", num(run.pipeline, seconds, "run.pipeline")], ["pipeline idle", num(run.bubble, percent, "run.bubble")],
    ["in flight, by rank", run.in_flight.length > 16 ? `${Math.max(...run.in_flight)} at most` : run.in_flight.join(" ")]]);
}
function criticalPanel(plan) {
  const shares = new Map();
  for (const [, , length, what, message] of plan.step.critical) {
    const name = message ? "messages" : /^\d*[FBIW]\d+$/.test(what) ? KINDS[what.replace(/[^FBIW]/g, "")] : what;
    shares.set(name, (shares.get(name) || 0) + length);
  }
  const total = plan.step.run.seconds * 1e9;
  return h("div", { class: "panel" }, h("h2", {}, "The critical path"), h("p", { class: "soft" }, "What the step would end later by, if it took longer."),
    table([["what"], ["time", true], ["of the step", true]], [...shares].sort((a, b) => b[1] - a[1]).map(([n, t]) => [n, nano(t), percent(t / total)]), "critical path"));
}
function renderSchedule(root, plan) {
  const options = { critical: true, messages: plan.step.messages.length < 400, collectives: true, idle: true };
  const gantt = new Gantt(plan, options);
  const holder = h("div"), detail = h("div", { class: "soft", "aria-live": "polite", style: "min-height:66px;white-space:pre-line;margin-top:8px" }, "Point at an action, or walk with n and p.");
  const toggles = Object.entries({ critical: "critical path", messages: "messages", collectives: "collectives", idle: "idle" }).map(([key, name]) => h("button", {
    "aria-pressed": options[key], onclick: (e) => { options[key] = !options[key]; e.target.setAttribute("aria-pressed", options[key]); drawn.paint(); } }, name));
  const key = (name, variable) => [name, `var(--${variable})`];
  const used = new Set(plan.step.actions.flatMap((own) => own.slice(0, 5000).map((a) => a[0])));
  const bar = h("div", { class: "bar" }, h("div", { class: "group" }, toggles), h("div", { class: "group" },
    h("button", { onclick: () => view.by(2), title: "Zoom in (+)" }, "+"), h("button", { onclick: () => view.by(0.5), title: "Zoom out (−)" }, "−"),
    h("button", { onclick: () => view.reset(), title: "All of it (0)" }, "all"), h("button", { onclick: () => zoomTo(firstComm()), id: "one-collective" }, "one collective")),
  legend([...["F", "B", "I", "W"].filter((k) => used.has(k)).map((k) => key(KINDS[k], k)), key("collective, or parameters and gradients on their way", "comm"), key("optimizer and other work once a step", "once"), key("idle", "idle"), key("critical path", "critical")]));
  root.append(h("div", { class: "panel" }, bar, holder, detail));
  const drawn = canvasOf(holder, gantt.height, "the schedule: plus and minus zoom, arrows move, n and p walk through actions", (context, width) => gantt.draw(context, width));
  const view = zoomable(gantt, drawn, () => { drawn.canvas.dataset.zoom = gantt.transform.k; });
  const pick = (mark) => { gantt.picked = mark; drawn.paint(); if (mark) detail.textContent = markText(plan, mark); };
  const firstComm = () => {
    const own = gantt.marks.flatMap((m) => m.comm.slice(0, 200)).filter((m) => !m.once);
    return gantt.picked && gantt.picked.kind === "comm" ? gantt.picked : own[0] || gantt.marks.flatMap((m) => m.comm)[0] || gantt.marks[0].compute[0];
  };
  const zoomTo = (mark) => { if (mark) { view.to(mark.start, mark.end); pick(mark); } };
  const local = (event) => { const box = drawn.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  drawn.canvas.addEventListener("mousemove", (event) => {
    const mark = gantt.at(...local(event)), idle = mark ? null : gantt.idleAt(...local(event));
    if (mark) showTip(markText(plan, mark), event.clientX, event.clientY); else if (idle) showTip(idle, event.clientX, event.clientY); else hideTip();
  });
  drawn.canvas.addEventListener("mouseleave", hideTip);
  drawn.canvas.addEventListener("click", (event) => pick(gantt.at(...local(event))));
  drawn.canvas.addEventListener("dblclick", (event) => zoomTo(gantt.at(...local(event))));
  drawn.canvas.addEventListener("keydown", (event) => {
    const walk = (by) => {
      const { rank = 0, kind } = gantt.picked || {}, own = kind === "comm" ? gantt.marks[rank].comm : gantt.marks[rank].compute;
      pick(own[Math.max(0, Math.min(own.length - 1, gantt.picked ? own.indexOf(gantt.picked) + by : 0))]);
    };
    const lane = (by) => {
      const rank = Math.max(0, Math.min(gantt.ranks - 1, (gantt.picked ? gantt.picked.rank : -by) + by));
      const t = gantt.picked ? gantt.picked.start : 0, own = gantt.marks[rank].compute;
      pick(own[Math.min(own.length - 1, firstAfter(own, t))]);
    };
    const does = { "+": () => view.by(2), "=": () => view.by(2), "-": () => view.by(0.5), 0: () => view.reset(), ArrowRight: () => view.pan(-120), ArrowLeft: () => view.pan(120),
      ArrowDown: () => lane(1), ArrowUp: () => lane(-1), n: () => walk(1), p: () => walk(-1), c: () => zoomTo(firstComm()), Enter: () => zoomTo(gantt.picked) }[event.key];
    if (does) { does(); event.preventDefault(); event.stopPropagation(); }
  });
  const { run } = plan.step;
  root.append(h("p", { class: "soft", style: "font-size:12px" }, "Keys: ", ["+", "−", "0", "←", "→"].flatMap((k) => [h("kbd", {}, k), " "]), "zoom and move; ", h("kbd", {}, "n"), " ", h("kbd", {}, "p"), " walk, ", h("kbd", {}, "↑"), " ", h("kbd", {}, "↓"), " change rank, ", h("kbd", {}, "Enter"), " zooms in, ", h("kbd", {}, "c"), " to one collective. With the drawing focused, or Shift held, the wheel zooms."));
  root.append(h("div", { class: "halves" }, h("div", { class: "panel" }, h("h2", {}, "The step"), scheduleFacts(plan)), criticalPanel(plan),
    h("div", { class: "panel" }, h("h2", {}, "Pipeline ranks"), h("div", { style: "max-height:340px;overflow:auto" }, table([["rank"], ["busy", true], ["idle", true], ["share idle", true], ["peak memory", true]],
      run.busy.map((busy, r) => [String(r), num(busy, seconds, `busy.${r}`), num(Math.max(0, run.idle[r]), seconds, `idle.${r}`), percent(Math.max(0, run.idle[r]) / run.seconds), num(run.peak[r], bytes, `peak.${r}`)]), "pipeline ranks")))));
}
views.push({ id: "schedule", title: "Schedule", render: renderSchedule, only: () => DATA.plans[state.plan].step });
