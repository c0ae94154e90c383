// Ranks: the mesh as a grid by node, who talks to whom, and what each runs.
function coordsOf(plan, rank) {
  const coords = {};
  for (const [name, size] of [...plan.mesh.axes].reverse()) { coords[name] = rank % size; rank = Math.floor(rank / size); }
  return Object.fromEntries(plan.mesh.axes.map(([name]) => [name, coords[name]]));
}
/** The ranks that differ from one on these axes alone. */
function groupOf(plan, rank, axes) {
  let found = [rank], stride = 1;
  for (const [name, size] of [...plan.mesh.axes].reverse()) {
    if (axes.includes(name)) {
      const at = Math.floor(rank / stride) % size;
      found = found.flatMap((r) => d3.range(size).map((i) => r + (i - at) * stride));
    }
    stride *= size;
  }
  return [...new Set(found)].sort((a, b) => a - b);
}
const placeText = (plan, rank) => Object.entries(coordsOf(plan, rank)).map(([a, i]) => `${a}=${i}`).join(", ");
const pipelineRank = (plan, rank) => coordsOf(plan, rank)[DATA.pipeline] || 0;
function stagesOf(plan, rank) {
  const own = pipelineRank(plan, rank);
  return plan.step.stage_to_rank.flatMap((r, i) => (r === own ? [i] : []));
}
function moduleOf(plan, rank, stage) {
  const own = Object.entries(coordsOf(plan, rank)).filter(([a]) => a !== DATA.pipeline).map(([a, i]) => `${a}=${i}`).join(",");
  return plan.module_of[stage][own];
}
/** Neighbours in the pipeline: those that a rank's sends go to. */
function pipelinePeers(plan, rank) {
  const stages = stagesOf(plan, rank), own = pipelineRank(plan, rank);
  const to = new Set();
  for (const s of stages) for (const next of [s - 1, s + 1]) {
    const at = plan.step.stage_to_rank[next];
    if (at !== undefined && at !== own) to.add(at);
  }
  return groupOf(plan, rank, [DATA.pipeline]).filter((r) => to.has(pipelineRank(plan, r)));
}
/** Those that share a weight of several stages: its gradient is summed over them. */
function tiedPeers(plan, rank, axes) {
  const own = stagesOf(plan, rank), stages = new Set(plan.inspect.parameters.filter((p) => p.stages.some((s) => own.includes(s))).flatMap((p) => (p.stages.length > 1 ? p.stages : [])));
  return groupOf(plan, rank, axes).filter((r) => stagesOf(plan, r).some((s) => stages.has(s)));
}
function peersOf(plan, rank, { axes, sends }) {
  if (sends) return pipelinePeers(plan, rank);
  return axes.includes(DATA.pipeline) && plan.inspect ? tiedPeers(plan, rank, axes) : groupOf(plan, rank, axes);
}
function trafficOf(plan, rank) {
  if (!plan.inspect) {
    return plan.mesh.axes.filter(([, n]) => n > 1).map(([axis]) => ({ axes: [axis], kinds: [], bytes: null, sends: axis === DATA.pipeline }));
  }
  const rows = new Map();
  for (const c of plan.inspect.communication) {
    if (!stagesOf(plan, rank).includes(c.stage)) continue;
    const sends = c.kind === "send", key = `${c.axes.join(",")} ${sends}`;
    const row = rows.get(key) || { axes: c.axes, kinds: new Map(), bytes: 0, sends };
    row.kinds.set(c.kind, (row.kinds.get(c.kind) || 0) + c.calls);
    row.bytes += c.bytes;
    rows.set(key, row);
  }
  return [...rows.values()].sort((a, b) => b.bytes - a.bytes);
}
function linkText(plan, axes) {
  const link = plan.mesh.links.find((l) => l.axes.join() === axes.join());
  if (!link || link.ranks < 2 || !link.bytes_per_second) return "";
  const across = link.in_node !== null;
  const nodes = plan.mesh.levels.length > 1 || across;
  return `${across ? `between nodes (${link.in_node} of ${link.ranks} in each)` : nodes ? "within a node" : "within the machine"}, ${bytes(link.bytes_per_second)}/s`;
}
function meshLayout(plan, width) {
  const { size, levels } = plan.mesh;
  const node = Math.min(size, levels.length > 1 ? levels[0][0] : size);
  const nodes = Math.ceil(size / node);
  const columns = node <= 8 ? node : Math.min(16, Math.ceil(Math.sqrt(node)));
  const side = size <= 8 ? 108 : size <= 16 ? 72 : size <= 128 ? 36 : size <= 1024 ? 16 : 11;
  const lines = Math.ceil(node / columns), gap = size <= 128 ? 14 : 6, head = size <= 128 ? 16 : 0;
  const boxWidth = columns * side + gap, boxHeight = lines * side + gap + head;
  const edge = 3, across = Math.max(1, Math.min(nodes, Math.floor((width - edge) / boxWidth)));
  const place = (rank) => {
    const n = Math.floor(rank / node), i = rank % node;
    return [edge + (n % across) * boxWidth + (i % columns) * side, edge + Math.floor(n / across) * boxHeight + head + Math.floor(i / columns) * side];
  };
  return { node, nodes, side, gap, head, boxWidth, boxHeight, across, place, columns, lines, edge, height: edge + Math.ceil(nodes / across) * boxHeight };
}
function drawMesh(context, plan, layout, shown) {
  const { side, place, node } = layout;
  const [, axisSize] = plan.mesh.axes.find(([a]) => a === shown.axis) || [null, 1];
  const base = d3.color(color(shown.axis) || color("whole")), paper = color("paper"), ink = color("ink");
  const shade = d3.interpolateRgb(paper, base);
  const peers = new Map();
  for (const traffic of trafficOf(plan, shown.rank)) {
    const { axes } = traffic;
    for (const r of peersOf(plan, shown.rank, traffic)) if (r !== shown.rank && !peers.has(r)) peers.set(r, axes[axes.length - 1]);
  }
  context.textAlign = "center";
  context.textBaseline = "middle";
  const box = side - (side > 20 ? 4 : 2);
  for (let rank = 0; rank < plan.mesh.size; rank += 1) {
    const [x, y] = place(rank), at = coordsOf(plan, rank)[shown.axis] || 0;
    if (rank % node === 0 && layout.head) {
      context.fillStyle = color("soft");
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText(layout.nodes > 1 ? `node ${rank / node}` : "one node", x, y - 9);
      context.textAlign = "center";
    }
    const fill = shade(0.22 + (0.7 * (at + 1)) / axisSize);
    context.fillStyle = fill;
    context.fillRect(x, y, box, box);
    if (side >= 30) {
      context.fillStyle = d3.lab(fill).l > 58 ? "#10131a" : "#ffffff";
      context.font = `600 ${side > 40 ? 14 : 12}px system-ui, sans-serif`;
      context.fillText(String(rank), x + box / 2, y + box / 2 - (side > 70 ? 8 : 0));
      if (side > 70) {
        context.font = "11px system-ui, sans-serif";
        context.fillText(Object.entries(coordsOf(plan, rank)).map(([a, i]) => `${a} ${i}`).join(" · "), x + box / 2, y + box / 2 + 12);
      }
    }
    if (peers.has(rank)) {
      context.strokeStyle = color(peers.get(rank)) || ink;
      context.lineWidth = side > 20 ? 4 : 2;
      context.strokeRect(x + 1, y + 1, box - 2, box - 2);
    }
  }
  const [x, y] = place(shown.rank);
  context.strokeStyle = ink;
  context.lineWidth = side > 20 ? 3 : 2;
  context.strokeRect(x - 1, y - 1, box + 2, box + 2);
}
function rankPanel(plan, rank) {
  const stages = stagesOf(plan, rank);
  const rows = trafficOf(plan, rank).map((t) => {
    const group = peersOf(plan, rank, t).filter((r) => r !== rank);
    return [h("span", {}, h("i", { style: `display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background:${axisColor(t.axes[t.axes.length - 1])}` }), t.axes.join(", ")),
      group.length > 24 ? `${group.length} ranks` : ranges(group), linkText(plan, t.axes),
      t.bytes === null ? "" : [...t.kinds].map(([k, n]) => `${n} ${k}`).join(", "), t.bytes === null ? "" : num(t.bytes, bytes, `traffic.${t.axes.join()}`)];
  });
  return [h("h2", {}, `Rank ${rank}`, h("span", { class: "soft", style: "font-weight:400" }, `  ${placeText(plan, rank) || "alone"}, ${stages.length > 1 ? "stages" : "stage"} ${ranges(stages)}`)),
    rows.length ? table([["over"], ["with ranks"], ["link"], ["calls a step"], ["gives a step", true]], rows, "traffic") : h("p", { class: "soft" }, "It talks to nobody."),
    plan.inspect ? h("p", { class: "soft" }, "Bytes are those that the first rank of the stage brings to its collectives and sends.") : h("p", { class: "soft" }, "Bytes are known when the plan is compiled.")];
}
function renderRanks(root, plan) {
  if (!plan.mesh) { root.append(empty("No plan here.")); return; }
  const shown = { rank: 0, axis: (plan.mesh.axes.find(([, n]) => n > 1) || [DATA.pipeline])[0] };
  const grid = h("div"), side = h("div", { class: "panel", "aria-live": "polite" }), code = h("div", { class: "panel" });
  const label = () => `the mesh of ${plan.mesh.size} ranks; arrow keys move from rank to rank`;
  let layout = null;
  root.append(h("div", { class: "panel" }, h("div", { class: "bar" }, h("div", { class: "group" }, h("span", { class: "soft" }, "shade by"),
    plan.mesh.axes.filter(([, n]) => n > 1).map(([a, n]) => h("button", { "aria-pressed": a === shown.axis, onclick: (e) => {
      shown.axis = a;
      for (const b of e.target.parentNode.querySelectorAll("button")) b.setAttribute("aria-pressed", b === e.target);
      drawn.paint();
    } }, `${a} ${n}`))), legend(plan.mesh.axes.filter(([, n]) => n > 1).map(([a]) => [`talks over ${a}`, axisColor(a)])),
  h("span", { class: "soft", style: "font-size:12px" }, `on ${plan.mesh.cluster}. Click a rank, or use arrow keys.`)), grid), side, code);
  const drawn = canvasOf(grid, (width) => { layout = meshLayout(plan, width); return layout.height; }, label(), (context) => drawMesh(context, plan, layout, shown));
  let module = null;
  const pick = (rank) => {
    shown.rank = rank;
    drawn.paint();
    drawn.canvas.setAttribute("aria-label", `rank ${rank}, ${placeText(plan, rank)}`);
    side.replaceChildren(...rankPanel(plan, rank));
    if (!plan.modules) { code.replaceChildren(h("p", { class: "soft" }, "What ranks run is emitted when the plan is compiled: "), h("code", {}, compileCommand(plan))); return; }
    const stages = stagesOf(plan, rank), keys = stages.map((s) => moduleOf(plan, rank, s));
    if (keys.join() === module) return;
    module = keys.join();
    const showStage = (i) => holder.replaceChildren(codePanes(plan, plan.modules[keys[i]], `modules/${keys[i]}.py`));
    const holder = h("div");
    code.replaceChildren(h("div", { class: "bar" }, h("h2", { style: "margin:0" }, "What it runs, and where that is in the model"),
      stages.length > 1 ? h("select", { "aria-label": "Stage", onchange: (e) => showStage(+e.target.value) }, stages.map((s, i) => h("option", { value: i }, `stage ${s}`))) : null), holder);
    showStage(0);
  };
  const rankAt = (event) => {
    const box = drawn.canvas.getBoundingClientRect(), x = event.clientX - box.left - layout.edge, y = event.clientY - box.top - layout.edge;
    const column = Math.floor(x / layout.boxWidth), line = Math.floor(y / layout.boxHeight);
    if (column >= layout.across) return null;
    const inX = Math.floor((x - column * layout.boxWidth) / layout.side), inY = Math.floor((y - line * layout.boxHeight - layout.head) / layout.side);
    if (inX < 0 || inX >= layout.columns || inY < 0 || inY >= layout.lines) return null;
    const rank = (line * layout.across + column) * layout.node + inY * layout.columns + inX;
    return inY * layout.columns + inX < layout.node && rank < plan.mesh.size ? rank : null;
  };
  drawn.canvas.addEventListener("click", (event) => { const rank = rankAt(event); if (rank !== null) pick(rank); });
  drawn.canvas.addEventListener("mousemove", (event) => {
    const rank = rankAt(event);
    if (rank === null) hideTip(); else showTip(`rank ${rank}: ${placeText(plan, rank)}`, event.clientX, event.clientY);
  });
  drawn.canvas.addEventListener("mouseleave", hideTip);
  drawn.canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: layout.columns, ArrowUp: -layout.columns }[event.key];
    if (!step) return;
    event.preventDefault();
    pick(Math.max(0, Math.min(plan.mesh.size - 1, shown.rank + step)));
  });
  pick(0);
}
views.push({ id: "ranks", title: "Ranks", render: renderRanks, only: () => DATA.plans[state.plan].mesh });
