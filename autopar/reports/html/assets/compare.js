// Two plans beside each other.
function compareRows(plans) {
  const rows = [], add = (name, shown, read, less = true) => rows.push([name, shown, plans.map(read), less]);
  add("a step", seconds, (p) => p.step && p.step.run.seconds);
  add("pipeline idle", percent, (p) => p.step && p.step.run.bubble);
  add("peak of a rank", bytes, (p) => p.step && Math.max(...p.step.run.peak));
  add("ranks", String, (p) => p.mesh && p.mesh.size);
  add("tokens a second, predicted", count, predictedSpeed, false);
  add("MFU, predicted", percent, (p) => p.choice && p.choice.explain.mfu, false);
  for (const term of ["parameters", "gradients", "optimizer", "activations"]) add(`${term}, of the rank with most`, bytes, (p) => p.memory && Math.max(...p.memory.terms.map((t) => t[term] || 0)));
  const traffic = (p) => p.inspect && d3.rollup(p.inspect.communication, (v) => d3.sum(v, (c) => c.bytes), (c) => c.axes.join(","));
  const sums = plans.map(traffic), axes = new Set(sums.flatMap((s) => (s ? [...s.keys()] : [])));
  for (const over of axes) add(`sent over ${over}, one rank of each stage`, bytes, (p) => (traffic(p) ? traffic(p).get(over) || 0 : null));
  const parts = new Set(plans.flatMap((p) => (p.choice ? Object.keys(p.choice.explain.parts) : [])));
  for (const part of parts) add(`of the step: ${part}`, seconds, (p) => (p.choice ? p.choice.explain.parts[part] || 0 : null));
  return rows.filter(([, , values]) => values.some((v) => typeof v === "number" && Math.abs(v) > 1e-9));
}
function renderCompare(root) {
  const plans = DATA.plans;
  const cells = compareRows(plans).map(([name, shown, [a, b], less]) => {
    const both = typeof a === "number" && typeof b === "number", better = both && a !== b ? ((b < a) === less ? "B" : "A") : "";
    return [name, typeof a === "number" ? num(a, shown, `A.${name}`) : "", typeof b === "number" ? num(b, shown, `B.${name}`) : "", both && a ? `${((100 * b) / a - 100 >= 0 ? "+" : "−") + Math.abs((100 * b) / a - 100).toFixed(1)}%` : "", name === "ranks" ? "" : better];
  });
  root.append(h("div", { class: "panel" }, h("h2", {}, "Two plans"), pairs(plans.map((p, i) => [`${"AB"[i]}: ${p.name}`, p.title || ""])),
    table([["what"], ["A", true], ["B", true], ["B against A", true], ["better"]], cells, "comparison")));
  for (const [i, plan] of plans.entries()) {
    if (!plan.step) continue;
    const holder = h("div"), gantt = new Gantt(plan, { critical: true, messages: false, collectives: true, idle: true });
    gantt.total = 1e9 * Math.max(...plans.map((p) => (p.step ? p.step.run.seconds : 0))); // one scale for both
    root.append(h("div", { class: "panel" }, h("h2", {}, `${"AB"[i]}: ${plan.name}`, h("span", { class: "soft", style: "font-weight:400" }, `  ${seconds(plan.step.run.seconds)}`)), holder));
    canvasOf(holder, gantt.height, `schedule of ${plan.name}`, (context, width) => gantt.draw(context, width)).paint();
  }
  const both = SERIES.slice(0, 3).map(([key, title, shown]) => [seriesOf(plans, key), title, shown]).filter(([s]) => s.length);
  if (both.length) {
    const grid = h("div", { class: "halves" });
    root.append(grid, legend(both[0][0].map((s, i) => [s.name, LINES[i % LINES.length]])));
    for (const [series, title, shown] of both) { const panel = h("div", { class: "panel" }); grid.append(panel); chart(panel, 210, title, (svg, width) => drawSeries(svg, width, title, series, shown, null, [])); }
  }
}
views.push({ id: "compare", title: "Compare", render: renderCompare, only: () => DATA.plans.length > 1 });
