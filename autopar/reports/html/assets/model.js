// The model and mesh: layers as rows, ops as cells in the order of data.
const NAMES = { native_layer_norm: "layer_norm", native_layer_norm_backward: "layer_norm_backward", scaled_dot_product_attention: "attention" };
const opName = (cell) => NAMES[cell.op] || cell.op;

/** Stages that follow each other and run one module are shown as one. */
function stageGroups(plan) {
  const groups = [];
  plan.view.stages.forEach((stage, i) => {
    const last = groups[groups.length - 1];
    if (last && last.view === stage.view) last.stages.push(i);
    else groups.push({ module: stage.module, view: stage.view, stages: [i] });
  });
  return groups;
}
function axisBar(axes) {
  const own = axes.length ? axes : ["whole"];
  return h("b", {}, own.map((a) => h("i", { style: `background:${axisColor(a)}` })));
}
const background = (axes) => {
  if (axes.length < 2) return axisColor(axes[0]);
  const step = 100 / axes.length;
  return `linear-gradient(180deg, ${axes.map((a, i) => `${axisColor(a)} ${i * step}% ${(i + 1) * step}%`).join(", ")})`;
};
function cellButton(cell, open, details) {
  const comm = Boolean(cell.kind);
  const label = comm ? `${cell.kind} over ${cell.over.join(",")}` : `${opName(cell)} ${cell.dims[0] || ""}`;
  const handlers = { onmouseenter: () => details(cell, button), onfocus: () => details(cell, button), onclick: () => details(cell, button, true), "aria-label": label };
  const button = open
    ? h("button", { class: `cell${comm ? " comm" : ""}${cell.view ? " view" : ""}`, style: comm ? `background:${background(cell.over)}` : null, ...handlers },
      comm ? `${cell.kind.replace("_", "-")} ${cell.over.join(",")}` : opName(cell),
      cell.pending.filter((p) => p !== "+time").map((p) => h("span", { class: "sum", style: `color:${axisColor(p.replace(/.*[:+]/, ""))}` }, p.startsWith("+") ? `Σ${p.slice(1)}` : p)),
      comm ? null : axisBar(cell.axes))
    : h("button", { class: `tick${comm ? " comm" : ""}`, style: `background:${background(comm ? cell.over : cell.axes)}`, ...handlers });
  return button;
}
function rowLabel(plan, stages, row) {
  if (!row.layer) return Object.keys(row.modules).join(", ") || (row.cells.every((c) => c.kind) ? "ahead" : "other");
  const names = (row.layers || [row.layer]).map((l) => plan.view.stages[stages[0]].numbers[l]).filter(Boolean);
  if (!names.length) return row.layer;
  const stem = names[0].replace(/\.?\d+$/, "").split(".").pop();
  const numbers = stages.flatMap((s) => (row.layers || [row.layer]).map((l) => plan.view.stages[s].numbers[l]).filter(Boolean).map((n) => +n.match(/(\d+)$/)[1]));
  return `${stem} ${ranges(numbers)}`;
}
function modelRow(plan, group, row, open, details) {
  const cells = h("div");
  const total = row.count * group.stages.length;
  const toggle = h("button", { "aria-expanded": open, title: "Open or fold" });
  const fill = () => {
    toggle.textContent = `${open ? "▾" : "▸"} ${rowLabel(plan, group.stages, row)}`;
    toggle.setAttribute("aria-expanded", open);
    cells.className = open ? "cells" : "ticks";
    cells.replaceChildren(...row.cells.map((c) => cellButton({ ...c, row, group }, open, details)));
  };
  toggle.addEventListener("click", () => { open = !open; fill(); });
  fill();
  roving(cells, ".cell, .tick");
  return h("div", { class: "row", "data-layer": row.layer }, h("div", { class: "name" }, toggle, total > 1 ? h("span", { class: "times" }, `× ${total}`) : null), cells);
}
function tensorRows(cell) {
  const short = (dtype) => dtype.replace("bfloat", "bf").replace("float", "f");
  return table([["made"], ["on a rank, and whole"], ["bytes", true]], cell.out.map(([name, shape, whole, dtype, size]) => [
    h("code", {}, name), h("span", { style: "white-space:nowrap" }, `${short(dtype)} [${shape.join(", ")}]`, whole ? [h("br"), h("span", { class: "soft" }, `of [${whole.join(", ")}]`)] : null), num(size, bytes, "cell.bytes")]), "tensors");
}
function cellDetails(plan, cell) {
  const per = cell.row.count, m = plan.microbatches;
  const line = sourceLine(plan, cell.source);
  const made = cell.dims.map((d) => d.replace(/^\[/, "").replace("]", "").replaceAll(",", ""));
  const emitted = plan.modules[cell.group.module].split("\n")[cell.line - 1];
  return [
    h("h2", {}, cell.kind ? `${cell.kind} over ${cell.over.join(", ")}` : cell.ops.join(" → ")),
    cell.reads.length || made.length ? h("p", { class: "mono pattern" }, cell.reads.length ? [cell.reads.join(", "), " → "] : "makes ", made.join(", ") || "in place") : null,
    cell.pending.length ? h("p", {}, cell.pending.map((p) => (p === "+time" ? "still to be summed over microbatches" : p.startsWith("+") ? `a pending sum over ${p.slice(1)}` : `a pending ${p.replace(":", " over ")}`)).join("; ")) : null,
    cell.out.length ? tensorRows(cell) : null,
    pairs([
      cell.kind ? ["a rank gives", num(cell.given, bytes, "cell.given")] : null,
      cell.kind && cell.row.function !== "prologue" && cell.row.function !== "epilogue" && per * m > 1 ? ["in a step", `${bytes(cell.given * per * m)}: ${per} layers, ${m} microbatches`] : null,
      ["split by", cell.axes.length ? cell.axes.join(", ") : "nothing"],
      ["module", cell.module || null],
      ["source", cell.source ? `${cell.source[0]}:${cell.source[1]}` : null],
    ]),
    line ? h("code", { class: "sourceline" }, line) : null,
    h("h3", {}, `emitted, line ${cell.line}`), h("code", { class: "sourceline" }, emitted.split("  # ")[0].trim()),
  ];
}
function stageFacts(plan, index) {
  const s = plan.inspect.stages[index];
  return [["parameters", num(s.parameters, count, `stage.${index}.parameters`)], ["their bytes", num(s.parameter_bytes, bytes, `stage.${index}.parameter_bytes`)],
    ["activations", num(s.activation_bytes, bytes, `stage.${index}.activation_bytes`)], ["FLOPs forward", num(s.forward_flops, count, `stage.${index}.forward_flops`)],
    ["a microbatch, measured at compiling", num(s.seconds, seconds, `stage.${index}.seconds`)]];
}
function renderModel(root, plan) {
  if (!plan.view) { root.append(empty("The model's ops are known when the plan is compiled.", compileCommand(plan))); return; }
  let phase = "forward", pinned = null;
  const side = h("aside", { class: "panel side", "aria-live": "polite" }, );
  const details = (cell, button, pin = false) => {
    if (pinned && !pin && pinned.isConnected) return;
    if (pin) pinned = pinned === button ? null : button; // a second click lets it go
    for (const other of root.querySelectorAll(".at")) other.classList.remove("at");
    button.classList.add("at");
    side.replaceChildren(...cellDetails(plan, cell).filter(Boolean));
  };
  const body = h("div");
  const draw = () => {
    pinned = null;
    const seen = new Set();
    body.replaceChildren(...stageGroups(plan).map((group) => {
      const module = plan.view.modules[group.view];
      const first = group.stages[0];
      const rows = module.rows[phase].map((row) => {
        const alike = row.cells.map((c) => `${c.op}${c.over || ""}${c.axes}`).join();
        const open = !seen.has(alike) && phase !== "once a step";
        if (row.layer) seen.add(alike);
        return modelRow(plan, group, row, open, details);
      });
      return h("div", { class: "panel stage" }, h("h3", {}, `stage ${ranges(group.stages)}`,
        stageFacts(plan, first).map(([k, v]) => h("span", { class: "soft" }, `${k} `, v)),
        group.stages.length > 1 ? h("span", { class: "soft" }, `numbers of stage ${first}`) : null), rows.length ? rows : h("p", { class: "soft" }, "nothing"),
        module.stopped ? h("p", { class: "soft" }, "How many rows go to an expert depends on their values: shapes, bytes and memory after that are not known here.") : null);
    }));
  };
  const buttons = Object.keys(Object.values(plan.view.modules)[0].rows).map((name) => h("button", { "aria-pressed": name === phase, onclick: (e) => {
    phase = name;
    for (const b of e.target.parentNode.children) b.setAttribute("aria-pressed", b === e.target);
    draw();
  } }, name));
  const fold = (open) => h("button", { onclick: () => root.querySelectorAll(`.row .name button[aria-expanded="${!open}"]`).forEach((b) => b.click()) }, open ? "open all" : "fold all");
  const own = plan.mesh.axes.filter(([, n]) => n > 1).map(([a]) => a).filter((a) => a !== DATA.pipeline);
  /** Shows an op that computes before any was pointed at. */
  const first = () => {
    const button = [...body.querySelectorAll(".row[data-layer]:not([data-layer='']) .cell, .cell")].find((b) => /linear|affine|matmul|mm/.test(b.textContent)) || body.querySelector(".cell");
    if (button) button.dispatchEvent(new MouseEvent("mouseenter"));
  };
  root.append(h("div", { class: "bar" }, h("div", { class: "group" }, buttons), h("div", { class: "group" }, fold(true), fold(false)),
    legend([...own.map((a) => [`split by ${a}`, axisColor(a)]), ["whole on each rank", "var(--whole)"]]),
    h("span", { class: "soft", style: "font-size:12px" }, "Σ: still to be summed over an axis; round: a collective; dashed: a view. Point at an op, or use Tab and arrows; a click keeps it.")),
  h("div", { class: "split" }, body, side), parametersPanel(plan));
  draw();
  first();
}
/** Equal parameters of equal layers in one row, as `autopar inspect` has them. */
function parametersPanel(plan) {
  const rows = new Map();
  for (const p of plan.inspect.parameters) {
    const name = p.parameter.replace(/(^|\.)(\d+)(?=\.)/, "$1*");
    const key = [name, p.shape.join("×"), p.dims, p.pending.join(" "), p.gathered.join(" ")].join("|");
    const number = /(?:^|\.)(\d+)\./.exec(p.parameter);
    const row = rows.get(key) || { name, p, numbers: [], stages: [] };
    if (number) row.numbers.push(+number[1]);
    row.stages.push(...p.stages);
    rows.set(key, row);
  }
  return h("div", { class: "panel" }, h("h2", {}, "Parameters"),
    table([["parameter"], ["shape"], ["named dims, where it rests"], ["gradient summed over"], ["gathered over"], ["stage"]],
      [...rows.values()].map(({ name, p, numbers, stages }) => [h("code", {}, name.replace("*", ranges(numbers))), p.shape.join(" × "), h("code", {}, p.dims), p.pending.join(", "), p.gathered.join(", "), ranges(stages)]), "parameters"),
    plan.inspect.remarks.length ? h("div", {}, h("h3", {}, "Remarks"), plan.inspect.remarks.map((n) => h("p", {}, n))) : null);
}
views.push({ id: "model", title: "Model and mesh", render: renderModel, only: () => DATA.plans[state.plan].mesh });
