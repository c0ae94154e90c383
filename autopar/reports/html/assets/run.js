// A run: what it logged, beside what was predicted.
const LINES = ["--F", "--B", "--W", "--axis-5", "--once"].map((v) => `var(${v})`);
const SERIES = [["loss", "loss", (v) => v.toFixed(4)], ["grad_norm", "gradient norm", three], ["tokens_per_second", "tokens a second", (v) => count(v)], ["mfu", "MFU", percent], ["lr", "learning rate", (v) => v.toExponential(2)]];
function predictedSpeed(plan) { return plan.step && plan.tokens ? plan.tokens / plan.step.run.seconds : null; }
function seriesOf(plans, key) {
  return plans.flatMap((plan, p) => plan.logs.map((log) => ({ name: plans.length > 1 ? `${"AB"[p]}: ${log.name}` : log.name, points: log.rows.filter((r) => typeof r[key] === "number").map((r) => [r.step, r[key]]) }))).filter((s) => s.points.length);
}
function drawSeries(svg, width, title, series, shown, expected, held) {
  const height = 210, margin = { left: 58, right: 14, top: 28, bottom: 24 }, all = series.flatMap((s) => s.points);
  const values = [...all.map((p) => p[1]), ...held.map((p) => p[1]), ...(expected ? [expected] : [])], [low, high] = d3.extent(values), room = (high - low || Math.abs(high) || 1) * 0.08;
  const x = d3.scaleLinear(d3.extent(all, (p) => p[0]), [margin.left, width - margin.right]), y = d3.scaleLinear([low - room, high + room], [height - margin.bottom, margin.top]);
  svg.append("g").attr("class", "grid").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(4).tickSize(-(width - margin.left - margin.right)).tickFormat(""));
  svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call((low === high ? d3.axisLeft(y).tickValues([low]) : d3.axisLeft(y).ticks(4)).tickFormat((v) => (Math.abs(v) >= 1000 ? count(v) : Math.abs(v) < 0.01 && v ? v.toExponential(0) : three(v))));
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`).call(d3.axisBottom(x).ticks(Math.max(2, width / 90)).tickFormat(d3.format("d")));
  svg.append("text").attr("x", 4).attr("y", 14).attr("style", "font-weight:600").text(title);
  series.forEach((s, i) => svg.append("path").datum(s.points).attr("fill", "none").attr("style", `stroke:${LINES[i % LINES.length]};stroke-width:1.6`).attr("d", d3.line((p) => x(p[0]), (p) => y(p[1]))));
  if (expected) {
    svg.append("line").attr("class", "predicted").attr("x1", margin.left).attr("x2", width - margin.right).attr("y1", y(expected)).attr("y2", y(expected)).attr("style", "stroke:var(--soft);stroke-dasharray:5 4");
    svg.append("text").attr("x", width - margin.right).attr("y", y(expected) - 5).attr("text-anchor", "end").attr("style", "fill:var(--soft);paint-order:stroke;stroke:var(--paper);stroke-width:4px").text(`predicted ${shown(expected)}`);
  }
  svg.selectAll("circle.held").data(held).join("circle").attr("class", "held").attr("cx", (p) => x(p[0])).attr("cy", (p) => y(p[1])).attr("r", 3.5).attr("style", "fill:var(--paper);stroke:var(--B);stroke-width:2");
  const rule = svg.append("line").attr("y1", margin.top).attr("y2", height - margin.bottom).attr("style", "stroke:var(--ink);stroke-dasharray:3 3;display:none");
  svg.append("rect").attr("x", margin.left).attr("y", margin.top).attr("width", width - margin.left - margin.right).attr("height", height - margin.top - margin.bottom).attr("fill", "transparent").on("mousemove", (event) => {
    const at = x.invert(d3.pointer(event)[0]);
    const near = series.map((s) => [s.name, d3.least(s.points, (p) => Math.abs(p[0] - at))]);
    rule.attr("x1", x(near[0][1][0])).attr("x2", x(near[0][1][0])).style("display", null);
    showTip(near.map(([name, p]) => `step ${p[0]}: ${shown(p[1])}${series.length > 1 ? ` (${name})` : ""}`).join("\n"), event.clientX, event.clientY);
  }).on("mouseleave", () => { hideTip(); rule.style("display", "none"); });
}
function measuredTable(plan) {
  const rows = plan.logs.map((log) => {
    const own = log.rows.filter((r) => r.tokens_per_second), late = own.slice(Math.floor(own.length / 2)), speed = d3.median(late, (r) => r.tokens_per_second), peak = d3.max(own, (r) => r.peak_memory);
    const last = log.rows.filter((r) => typeof r.loss === "number").pop();
    return { log, speed, peak, last };
  });
  const predicted = predictedSpeed(plan), heldPeak = plan.step ? Math.max(...plan.step.run.peak) : null;
  return table([["run"], ["steps", true], ["last loss", true], ["tokens/s, predicted", true], ["measured", true], ["measured / predicted", true], ["peak, predicted", true], ["peak of the process", true]],
    rows.map(({ log, speed, peak, last }) => [log.name, last ? String(last.step) : "", last ? num(last.loss, (v) => v.toFixed(4), "run.loss") : "", predicted ? num(predicted, count, "run.predicted") : "", speed ? num(speed, count, "run.measured") : "",
      predicted && speed ? percent(speed / predicted) : "", heldPeak ? bytes(heldPeak) : "", peak ? bytes(peak) : ""]), "predicted beside measured");
}
function renderRun(root, plan) {
  if (!plan.logs.length) { root.append(empty("No run has logged here yet.", `autopar run ${quoted(plan.folder)} --log-file ${quoted(`${plan.folder}/run.jsonl`)}`)); return; }
  root.append(h("div", { class: "panel" }, h("h2", {}, "Predicted beside measured"), measuredTable(plan), h("p", { class: "soft", style: "margin-top:8px" }, "Measured: the median of the later half of what was logged. On a CPU the peak is the whole process's, libraries included.")));
  const grid = h("div", { class: "halves" });
  root.append(grid, plan.logs.length > 1 ? legend(plan.logs.map((log, i) => [log.name, LINES[i % LINES.length]])) : "");
  for (const [key, title, shown] of SERIES) {
    const series = seriesOf([plan], key);
    if (!series.length) continue;
    const held = key === "loss" ? plan.logs.flatMap((log) => log.rows.filter((r) => typeof r.eval_loss === "number").map((r) => [r.step, r.eval_loss])) : [];
    const panel = h("div", { class: "panel" });
    grid.append(panel);
    chart(panel, 210, title, (svg, width) => drawSeries(svg, width, title + (held.length ? " (circles: held out)" : ""), series, shown, key === "tokens_per_second" ? predictedSpeed(plan) : null, held));
  }
}
views.push({ id: "run", title: "Run", render: renderRun });
