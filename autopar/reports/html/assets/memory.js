// Memory: each pipeline rank over the step, by what it is, with its limit and its peak.
const TERMS = [["parameters", "weights", "m0"], ["gradients", "gradients", "m1"], ["optimizer", "optimizer state", "m2"], ["buffers", "buffers", "m3"],
  ["gathered", "gathered for a step", "m4"], ["kept", "activations kept for backwards", "m5"], ["workspace", "workspace of what runs", "m6"]];

/** (from, to, term -> bytes), piece by piece of the step. */
function memoryPieces(plan, rank) {
  const terms = plan.memory.terms[rank], rest = {}, points = plan.step.memory[rank];
  let resting = 0;
  for (const [name] of TERMS) if (terms[name] !== undefined && name !== "gathered") { rest[name] = terms[name]; resting += terms[name]; }
  const gathered = plan.memory.gathered[rank], total = plan.step.run.seconds * 1e9, pieces = [];
  const level = (at) => Math.max(0, points[at][1] - resting);
  const own = plan.step.actions[rank], begin = own[0][3], end = own[own.length - 1][3] + own[own.length - 1][4];
  for (let i = 0; i < points.length; i += 1) {
    const from = points[i][0], to = i + 1 < points.length ? points[i + 1][0] : total;
    if (to <= from) continue;
    // A backward has what was kept until it ends, a forward makes what is kept after it.
    const alive = level(i), before = i ? level(i - 1) : alive, after = i + 1 < points.length ? level(i + 1) : alive;
    const inside = from >= begin && to <= end, steady = inside ? Math.min(alive, Math.max(before, after)) : Math.min(alive, gathered), whole = Math.min(gathered, steady);
    pieces.push({ from, to, ...rest, gathered: whole, kept: steady - whole, workspace: alive - steady, sum: points[i][1] });
  }
  return pieces;
}
const peakOf = (pieces) => pieces.reduce((a, b) => (b.sum > a.sum ? b : a));
function actionAt(plan, rank, t) {
  return plan.step.actions[rank].find(([, , , start, length]) => start <= t && t < start + length);
}
/** Microbatches of each stage that are between forward and backward at a time. */
function inFlight(plan, rank, t) {
  const found = new Map();
  for (const [kind, stage, , start, length] of plan.step.actions[rank]) {
    if (kind === "F" && start <= t) found.set(stage, (found.get(stage) || 0) + 1);
    if ((kind === "B" || kind === "I") && start + length <= t) found.set(stage, found.get(stage) - 1);
  }
  return found;
}
const stagesOfPlace = (plan, rank) => plan.step.stage_to_rank.flatMap((r, i) => (r === rank ? [i] : []));
/** Whether a time is between a rank's first action and its last. */
function actionNear(plan, rank, t) {
  const own = plan.step.actions[rank], last = own[own.length - 1];
  return t >= own[0][3] && t <= last[3] + last[4];
}
function peakTensors(plan, rank, peak) {
  if (!plan.view) return null;
  const rows = [], middle = (peak.from + peak.to) / 2;
  const running = actionAt(plan, rank, middle);
  for (const [stage, many] of inFlight(plan, rank, middle)) {
    const module = plan.view.modules[plan.view.stages[stage].view];
    for (const r of module.residuals) rows.push({ ...r, total: r.bytes * many, why: `kept of ${many} ${many === 1 ? "microbatch" : "microbatches"}${r.count > 1 ? ` × ${r.count} layers` : ""}`, stage });
  }
  for (const stage of actionNear(plan, rank, middle) ? [] : stagesOfPlace(plan, rank)) {
    const part = middle < plan.step.actions[rank][0][3] ? "prologue" : "epilogue", own = plan.view.modules[plan.view.stages[stage].view].peaks[part];
    for (const [name, size] of own ? own.alive : []) rows.push({ name, total: size, why: `alive in ${part}, emitted line ${own.line}`, dims: "", module: "", source: null, stage });
  }
  if (running) {
    const names = { F: ["forward"], B: ["backward", "backward_input"], I: ["backward_input"], W: ["backward_weight"] }[running[0]];
    const module = plan.view.modules[plan.view.stages[running[1]].view];
    const own = names.map((n) => module.peaks[n]).find(Boolean);
    const kept = new Set(module.residuals.map((r) => r.name));
    for (const [name, size] of own ? own.alive : []) {
      if (!kept.has(name)) rows.push({ name, total: size, why: `alive in ${running[0]}${running[2]}, emitted line ${own.line}`, dims: "", module: "", source: null, stage: running[1] });
    }
  }
  return { rows: rows.sort((a, b) => b.total - a.total), running };
}
function stepPath(pieces, x, y, below, terms) {
  const upper = [], lower = [];
  for (const p of pieces) {
    const base = d3.sum(below, (n) => p[n] || 0), height = base + (p[terms] || 0);
    upper.push([x(p.from), y(height)], [x(p.to), y(height)]);
    lower.push([x(p.from), y(base)], [x(p.to), y(base)]);
  }
  return d3.line()([...upper, ...lower.reverse()]) + "Z";
}
/** As many pieces as there are pixels: of those that share one the highest is drawn. */
function thinned(pieces, x) {
  const found = [];
  let last = null;
  for (const p of pieces) {
    const pixel = Math.round(x(p.from));
    if (last && Math.round(x(p.to)) === pixel && last.pixel === pixel) { if (p.sum > last.piece.sum) { last.piece = { ...p, from: last.piece.from }; found[found.length - 1] = last.piece; } last.piece.to = p.to; } else { last = { pixel, piece: { ...p } }; found.push(last.piece); }
  }
  for (let i = 1; i < found.length; i += 1) found[i - 1].to = found[i].from;
  return found;
}
function drawMemory(svg, width, plan, rank, height, label) {
  const pieces = memoryPieces(plan, rank), peak = peakOf(pieces), { limit } = plan.memory;
  const top = Math.max(peak.sum, limit && limit < 3 * peak.sum ? limit : 0) * 1.08;
  const margin = { left: 66, right: 30, top: 26, bottom: 26 };
  const x = d3.scaleLinear([0, plan.step.run.seconds * 1e9], [margin.left, width - margin.right]), y = d3.scaleLinear([0, top], [height - margin.bottom, margin.top]);
  svg.append("g").attr("class", "grid").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(5).tickSize(-(width - margin.left - margin.right)).tickFormat(""));
  const shown = TERMS.filter(([name]) => pieces.some((p) => p[name])), drawn = thinned(pieces, x);
  shown.forEach(([name, , variable], i) => svg.append("path").attr("d", stepPath(drawn, x, y, shown.slice(0, i).map(([n]) => n), name)).attr("style", `fill:var(--${variable})`).attr("data-term", name));
  svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call(byteTicks(d3.axisLeft(y), 5));
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`).call(d3.axisBottom(x).ticks(Math.max(2, width / 120)).tickFormat(nano));
  if (limit) {
    const above = limit > top, at = above ? margin.top - 8 : y(limit);
    if (!above) svg.append("line").attr("class", "limit").attr("x1", margin.left).attr("x2", width - margin.right).attr("y1", at).attr("y2", at);
    svg.append("text").attr("class", "limit-text").attr("x", width - margin.right).attr("y", at - 5).attr("text-anchor", "end").text(`limit ${bytes(limit)}${above ? ", above this" : ""}`);
  }
  const px = x((peak.from + peak.to) / 2), right = px < width * 0.6;
  svg.append("circle").attr("cx", px).attr("cy", y(peak.sum)).attr("r", 4).attr("style", "fill:var(--paper);stroke:var(--ink);stroke-width:2");
  svg.append("text").attr("class", "peak").attr("x", px + (right ? 8 : -8)).attr("y", y(peak.sum) - 7).attr("text-anchor", right ? "start" : "end").attr("style", "font-weight:600").text(label(peak));
  const rule = svg.append("line").attr("y1", margin.top).attr("y2", height - margin.bottom).attr("style", "stroke:var(--ink);stroke-dasharray:3 3;display:none");
  svg.append("rect").attr("x", margin.left).attr("y", margin.top).attr("width", width - margin.left - margin.right).attr("height", height - margin.top - margin.bottom).attr("fill", "transparent")
    .on("mousemove", (event) => {
      const t = x.invert(d3.pointer(event)[0]), piece = pieces.find((p) => p.from <= t && t < p.to) || pieces[pieces.length - 1], a = actionAt(plan, rank, t);
      rule.attr("x1", x(t)).attr("x2", x(t)).style("display", null);
      showTip([`${nano(t)}${a ? `: ${a[0]}${a[2]}` : ""}`, `${bytes(piece.sum)} in all`, ...shown.slice().reverse().map(([n, title]) => `${title}: ${bytes(piece[n])}`)].join("\n"), event.clientX, event.clientY);
    }).on("mouseleave", () => { hideTip(); rule.style("display", "none"); });
  return { pieces, peak };
}
/** A bar for each pipeline rank at its peak; a click shows it. */
function rankBars(parent, plan, pick, current) {
  const ranks = plan.memory.terms.length, { limit } = plan.memory;
  const peaks = d3.range(ranks).map((r) => peakOf(memoryPieces(plan, r)));
  const top = Math.max(d3.max(peaks, (p) => p.sum), limit && limit < 3 * d3.max(peaks, (p) => p.sum) ? limit : 0) * 1.05;
  return chart(parent, 150, "the peak of each pipeline rank", (svg, width) => {
    const x = d3.scaleBand(d3.range(ranks), [66, Math.min(width - 12, 66 + ranks * 90)]).paddingInner(ranks > 40 ? 0.1 : 0.25), y = d3.scaleLinear([0, top], [126, 12]);
    svg.append("g").attr("class", "axis").attr("transform", "translate(66,0)").call(byteTicks(d3.axisLeft(y), 3));
    const bars = svg.selectAll("g.bar-rank").data(peaks).join("g").attr("class", "bar-rank").attr("tabindex", (_, i) => (i === current() ? 0 : -1)).attr("role", "button")
      .attr("aria-label", (p, i) => `pipeline rank ${i}, peak ${bytes(p.sum)}`).attr("style", "cursor:pointer").on("click", (_, p) => pick(peaks.indexOf(p)))
      .on("keydown", (event, p) => { if (event.key === "Enter" || event.key === " ") { pick(peaks.indexOf(p)); event.preventDefault(); } })
      .on("focus", (_, p) => pick(peaks.indexOf(p)));
    bars.each(function bar(p, i) {
      let below = 0;
      for (const [name, , variable] of TERMS) {
        if (!p[name]) continue;
        d3.select(this).append("rect").attr("x", x(i)).attr("width", x.bandwidth()).attr("y", y(below + p[name])).attr("height", y(below) - y(below + p[name])).attr("style", `fill:var(--${variable});opacity:${i === current() ? 1 : 0.55}`);
        below += p[name];
      }
      if (ranks <= 40 || i % 4 === 0) d3.select(this).append("text").attr("x", x(i) + x.bandwidth() / 2).attr("y", 142).attr("text-anchor", "middle").text(ranks <= 12 ? `${DATA.pipeline} ${i}` : i);
    });
    if (limit && limit <= top) svg.append("line").attr("class", "limit").attr("x1", 66).attr("x2", width - 12).attr("y1", y(limit)).attr("y2", y(limit));
  });
}
function renderMemory(root, plan) {
  let rank = plan.step.run.peak.indexOf(Math.max(...plan.step.run.peak));
  const main = h("div"), bars = h("div"), tensors = h("div", { class: "panel" }), title = h("h2");
  const used = TERMS.filter(([name]) => d3.range(plan.memory.terms.length).some((r) => memoryPieces(plan, r).some((p) => p[name])));
  root.append(h("div", { class: "panel" }, h("h2", {}, "The peak of each pipeline rank"), bars, legend([...used.map(([, name, v]) => [name, `var(--${v})`]), ...(plan.memory.limit ? [["limit", "var(--warn)"]] : [])])),
    h("div", { class: "panel" }, title, main), tensors);
  const show = () => {
    const pieces = memoryPieces(plan, rank), peak = peakOf(pieces), found = peakTensors(plan, rank, peak);
    const largest = found && found.rows[0];
    title.textContent = `Pipeline rank ${rank} over the step`;
    main.replaceChildren();
    chart(main, 320, `memory of pipeline rank ${rank} over the step`, (svg, width) => drawMemory(svg, width, plan, rank, 320, (p) => `peak ${bytes(p.sum)}${!actionNear(plan, rank, (p.from + p.to) / 2) ? ", where parameters come or gradients leave" : largest ? `; largest: ${largest.name === "?" ? "kept of layers" : largest.name}${largest.module ? ` of ${largest.module.split(".").slice(-2).join(".")}` : ""}, ${bytes(largest.total)}` : ""}`));
    tensors.replaceChildren(h("h2", {}, "At the peak"), peakTable(plan, rank, peak, found));
  };
  const pick = (r) => { if (r === rank) return; rank = r; show(); for (const [i, g] of bars.querySelectorAll("g.bar-rank").entries()) { g.setAttribute("tabindex", i === r ? 0 : -1); for (const rect of g.querySelectorAll("rect")) rect.style.opacity = i === r ? 1 : 0.55; } };
  rankBars(bars, plan, pick, () => rank);
  roving(bars, "g.bar-rank");
  show();
}
function peakTable(plan, rank, peak, found) {
  const action = found && found.running;
  const head = h("p", {}, num(peak.sum, bytes, `memory.peak.${rank}`), ` at ${nano((peak.from + peak.to) / 2)}${action ? `, in ${action[0]}${action[2]} of stage ${action[1]}` : ""}: `,
    TERMS.filter(([n]) => peak[n]).map(([n, title], i) => [i ? ", " : "", `${title} `, num(peak[n], bytes, `memory.${rank}.${n}`)]));
  if (!found) return h("div", {}, head, h("p", { class: "soft" }, "Which tensors these are is known when the plan is compiled."));
  return h("div", {}, head, table([["tensor"], ["named dims"], ["from"], ["module"], ["why it is there"], ["bytes", true]], found.rows.slice(0, 20).map((r) => [
    h("code", {}, r.name === "?" ? "" : r.name), h("code", {}, r.dims || ""), r.source ? `${r.source[0]}:${r.source[1]}` : "", r.module, r.why, bytes(r.total)]), "tensors at the peak"));
}
views.push({ id: "memory", title: "Memory", render: renderMemory, only: () => DATA.plans[state.plan].memory });
