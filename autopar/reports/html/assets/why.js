// Why this plan: candidates by time and memory, what others lose, what prices are made of.
function partColor(term) {
  if (term === "compute") return "var(--F)";
  if (term === "idle") return "var(--idle)";
  if (term === "optimizer" || term === "once a step") return "var(--once)";
  if (term === "shared cores") return "var(--B)";
  const axes = term.split(" ").pop().split(",");
  return axisColor(axes[axes.length - 1]);
}
const fits = (plan, r) => r.peak <= plan.choice.limit;
function drawScatter(svg, width, plan, rows, current, pick) {
  const margin = { left: 66, right: 24, top: 30, bottom: 40 }, height = 360, { limit } = plan.choice;
  const pad = (domain, share) => { const room = (domain[1] - domain[0] || domain[1] * 0.2) * share; return [Math.max(0, domain[0] - room), domain[1] + room]; };
  const high = d3.max(rows, (r) => r.peak), withLimit = limit < 2.5 * high;
  const others = plan.choice.others.filter((r) => r.peak <= 1.3 * Math.max(high, withLimit ? limit : 0)), all = [...rows, ...others];
  const x = d3.scaleLinear(pad(d3.extent(all, (r) => r.seconds), 0.12), [margin.left, width - margin.right]).nice();
  const y = d3.scaleLinear(pad(d3.extent([...all.map((r) => r.peak), ...(withLimit ? [limit] : [])]), 0.12), [height - margin.bottom, margin.top]).nice();
  svg.append("g").attr("class", "grid").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(6).tickSize(-(width - margin.left - margin.right)).tickFormat(""));
  svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call(byteTicks(d3.axisLeft(y), 6));
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`).call(d3.axisBottom(x).ticks(Math.max(3, width / 130)).tickFormat(seconds));
  svg.append("text").attr("x", width - margin.right).attr("y", height - 4).attr("text-anchor", "end").attr("style", "fill:var(--soft)").text("a step");
  svg.append("text").attr("x", margin.left - 58).attr("y", 14).attr("style", "fill:var(--soft)").text("peak memory of a device");
  if (withLimit) {
    svg.append("line").attr("class", "limit").attr("x1", margin.left).attr("x2", width - margin.right).attr("y1", y(limit)).attr("y2", y(limit));
    svg.append("text").attr("class", "limit-text").attr("x", width - margin.right).attr("y", y(limit) - 5).attr("text-anchor", "end").text(`limit ${bytes(limit)}`);
  }
  svg.append("g").selectAll("circle").data(others).join("circle").attr("class", "priced").attr("cx", (r) => x(r.seconds)).attr("cy", (r) => y(r.peak)).attr("r", 3)
    .attr("style", (r) => `fill:${fits(plan, r) ? "var(--whole)" : "none"};stroke:var(--whole);opacity:0.6`)
    .on("mousemove", (event, r) => showTip([r.plan, `about ${seconds(r.seconds)} a step, ${bytes(r.peak)}`, fits(plan, r) ? `${signed(r.seconds - rows[0].seconds, seconds)} a step` : `does not fit: a device has ${bytes(limit)}`].join("\n"), event.clientX, event.clientY)).on("mouseleave", hideTip);
  const front = rows.filter((r) => r.front).sort((a, b) => a.seconds - b.seconds);
  svg.append("path").datum(front).attr("d", d3.line((r) => x(r.seconds), (r) => y(r.peak)).curve(d3.curveStepAfter)).attr("fill", "none").attr("style", "stroke:var(--accent);stroke-width:1.5;stroke-dasharray:4 3");
  const dots = svg.append("g").selectAll("circle").data(rows).join("circle").attr("cx", (r) => x(r.seconds)).attr("cy", (r) => y(r.peak)).attr("r", (r) => (r === rows[0] ? 8 : 6))
    .attr("tabindex", (r) => (r === current() ? 0 : -1)).attr("role", "button").attr("aria-label", (r) => `${r.plan}: ${seconds(r.seconds)}, ${bytes(r.peak)}`).attr("class", "candidate")
    .attr("style", (r) => `cursor:pointer;fill:${r === rows[0] ? "var(--accent)" : r.front ? "var(--paper)" : "var(--whole)"};stroke:${r.front ? "var(--accent)" : "var(--paper)"};stroke-width:2`)
    .on("mousemove", (event, r) => showTip([r.plan, `${seconds(r.seconds)} a step, ${bytes(r.peak)}`, ...r.because].join("\n"), event.clientX, event.clientY)).on("mouseleave", hideTip)
    .on("click", (_, r) => pick(r)).on("focus", (_, r) => pick(r));
  dots.filter((r) => r === rows[0]).raise();
  const best = rows[0], end = x(best.seconds) > width * 0.6;
  svg.append("text").attr("x", x(best.seconds) + (end ? -12 : 12)).attr("y", y(best.peak) - 10).attr("text-anchor", end ? "end" : "start").attr("style", "font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:4px").text("taken");
}
function partsBar(row, longest) {
  const terms = Object.entries(row.parts).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]);
  return h("div", { class: "parts", style: `width:${(100 * row.seconds) / longest}%`, role: "img", "aria-label": terms.slice(0, 4).map(([t, s]) => `${t} ${seconds(s)}`).join(", ") },
    terms.map(([term, s]) => h("i", { style: `flex:${s / row.seconds} 0 0;background:${partColor(term)}`, onmousemove: (e) => showTip(`${term}: ${seconds(s)}, ${percent(s / row.seconds)}`, e.clientX, e.clientY), onmouseleave: hideTip })));
}
function candidateTable(plan, rows, pick) {
  const longest = d3.max(rows, (r) => r.seconds), best = rows[0];
  const body = rows.map((r) => ({ attributes: { tabindex: "0", "data-plan": r.plan, onclick: () => pick(r), onkeydown: (e) => { if (e.key === "Enter") pick(r); } }, cells: [
    h("span", {}, r.plan, r.front ? h("span", { class: "soft" }, "  on the front") : null), num(r.seconds, seconds, "candidate.seconds"), r === best ? "" : signed(r.seconds - best.seconds, seconds),
    num(r.peak, bytes, "candidate.peak"), percent(r.bubble), percent(r.communication / r.seconds), percent(r.mfu), h("div", { style: "min-width:170px" }, partsBar(r, longest)), h("span", {}, r === best ? "taken" : r.because.join("; "))] }));
  return table([["plan"], ["a step", true], ["more", true], ["peak", true], ["idle", true], ["waits", true], ["MFU", true], ["where the time goes"], ["because of"]], body, "candidates");
}
function pricesPanel(plan) {
  const { sources } = plan.choice, shown = Object.entries(sources).filter(([, shares]) => Object.keys(shares).length);
  return h("div", { class: "panel" }, h("h2", {}, "Measured, or looked up"), h("p", {}, plan.choice.priced),
    shown.map(([what, shares]) => h("div", {}, h("h3", {}, what), pairs(Object.entries(shares).map(([how, s]) => [percent(s), how])))));
}
function formulasPanel(plan) {
  const found = Object.entries(plan.choice.formulas);
  return h("div", { class: "panel" }, h("h2", {}, "Formulas, in named dims"), found.length ? h("dl", {}, found.flatMap(([what, text]) => [h("dt", { class: "soft" }, what), h("dd", { style: "margin:0 0 8px" }, h("code", { class: "pattern" }, text.replaceAll("**", "^").replaceAll("*", "·")))]))
    : h("p", { class: "soft" }, "They come out of the captured model: ", h("code", {}, `autopar report ${quoted(plan.folder)} --formulas`)));
}
function partsPanel(row) {
  const terms = Object.entries(row.parts).filter(([, s]) => s > 1e-9 * row.seconds).sort((a, b) => b[1] - a[1]);
  return [h("h2", {}, "Where the seconds go"), h("p", { class: "soft" }, `${row.plan}; on the slowest pipeline rank`), table([["part"], ["time", true], ["share", true]],
    [...terms.map(([t, s]) => [h("span", {}, h("i", { style: `display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background:${partColor(t)}` }), t), num(s, seconds, `part.${t}`), percent(s / row.seconds)]), ["the step", num(row.seconds, seconds, "part.step"), "100.0%"]], "parts")];
}
function renderWhy(root, plan) {
  if (!plan.choice) {
    root.append(empty("Nobody searched for this plan: its decisions were given. To see what others would take:", `autopar plan ${quoted(plan.model)} --devices ${plan.mesh.cluster} -o planned && autopar report planned`));
    return;
  }
  const rows = plan.choice.candidates, parts = h("div", { class: "panel", "aria-live": "polite" });
  let current = rows[0];
  const pick = (r) => {
    current = r;
    parts.replaceChildren(...partsPanel(r));
    for (const row of root.querySelectorAll("tr[data-plan]")) row.classList.toggle("picked", row.dataset.plan === r.plan);
    for (const dot of root.querySelectorAll("circle.candidate")) dot.style.strokeWidth = dot.__data__ === r ? 4 : 2;
  };
  const scatter = h("div");
  root.append(h("div", { class: "split" }, h("div", { class: "panel" }, h("h2", {}, `The ${rows.length} best of ${plan.choice.tried.toLocaleString("en")} candidates`), scatter,
    legend([["taken", "var(--accent)"], ["on the Pareto front of the best: none of them is better in both", "color-mix(in srgb, var(--accent) 35%, var(--paper))"], ["others", "var(--whole)"]]), plan.choice.others.length ? h("p", { class: "soft" }, `Small: ${plan.choice.others.length.toLocaleString("en")} more, priced by the search's formula alone; empty ones do not fit.`) : null), parts),
  h("div", { class: "panel" }, h("h2", {}, "What each other plan loses"), rows.some((r) => r.seconds < rows[0].seconds)
    ? h("p", { class: "soft" }, `Faster by less than ${(100 * plan.choice.alike).toFixed(0)} % is within what estimates can tell: of those the simplest was taken.`) : null, candidateTable(plan, rows, pick)), h("div", { class: "halves" }, pricesPanel(plan), formulasPanel(plan)));
  chart(scatter, 360, "candidates by time and memory", (svg, width) => drawScatter(svg, width, plan, rows, () => current, pick));
  roving(scatter, "circle.candidate");
  pick(current);
}
views.push({ id: "why", title: "Why this plan", render: renderWhy, only: () => DATA.plans[state.plan].step });
