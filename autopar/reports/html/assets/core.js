// What all views share: the data, numbers as people read them, elements, colours.
const DATA = JSON.parse(document.getElementById("data").textContent);
/** Undoes what makes the data small: see step_data and _texts in Python. */
function unpack(plan) {
  if (plan.lines) for (const key of Object.keys(plan.modules)) {
    const own = plan.modules[key];
    Object.defineProperty(plan.modules, key, { get: () => own.map((i) => plan.lines[i]).join("\n"), enumerable: true });
  }
  const { step } = plan;
  if (!step) return plan;
  step.actions = step.actions.map((flat) => {
    const rows = [];
    let end = 0;
    for (let i = 0; i < flat.length; i += 3) {
      const [kind, stage, length] = step.templates[flat[i]], start = end + flat[i + 2];
      rows.push([kind, stage, flat[i + 1], start, length, flat[i]]);
      end = start + length;
    }
    return rows;
  });
  step.memory = step.memory.map((flat) => {
    const rows = [];
    let at = 0;
    for (let i = 0; i < flat.length; i += 2) { at += flat[i]; rows.push([at, step.levels[flat[i + 1]]]); }
    return rows;
  });
  step.messages = messagesOf(step);
  return plan;
}
/** What an action makes for one on another rank: the next stage's forward, or the backward of the one before. */
function messagesOf(step) {
  const ends = new Map(), found = [];
  step.actions.forEach((own, rank) => own.forEach(([kind, stage, microbatch, start, length]) => {
    if (kind !== "W") ends.set(`${kind === "F" ? "F" : "B"}${stage}.${microbatch}`, [rank, start, start + length]);
  }));
  step.actions.forEach((own, rank) => own.forEach(([kind, stage, microbatch, start]) => {
    if (kind === "W") return;
    const from = ends.get(kind === "F" ? `F${stage - 1}.${microbatch}` : `B${stage + 1}.${microbatch}`);
    if (from && from[0] !== rank) found.push([kind, stage, microbatch, from[0], from[2], rank, start]);
  }));
  return found;
}
DATA.plans.forEach(unpack);
const views = [];
const state = { plan: 0, view: null };

const three = (x) => String(Number(x.toPrecision(3)));

/** 1.23 M: three digits and a decimal prefix. */
function count(n, unit = "") {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let i = 0;
  while (Math.abs(n) >= 999.5 && i < prefixes.length - 1) { n /= 1000; i += 1; }
  return `${three(n)} ${prefixes[i]}${unit}`.trimEnd();
}
const bytes = (n) => count(n, "B");
const percent = (x) => `${(100 * x).toFixed(1)}%`;
function seconds(t) {
  if (t === 0) return "0 s";
  if (t >= 100) return `${Math.round(t).toLocaleString("en")} s`;
  if (t >= 1) return `${three(t)} s`;
  if (t >= 1e-3) return `${three(t * 1e3)} ms`;
  return `${three(t * 1e6)} µs`;
}
const nano = (t) => seconds(t / 1e9);
const signed = (x, shown) => `${x >= 0 ? "+" : "−"}${shown(Math.abs(x))}`;

/** [0, 1, 2, 5] -> 0-2,5 */
function ranges(numbers) {
  const runs = [];
  for (const n of [...new Set(numbers)].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && last[1] === n - 1) last[1] = n; else runs.push([n, n]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

/** An element; children are texts or elements. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("aria-")) element.setAttribute(key, String(value));
    else if (value === false) continue;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined));
  return element;
}
/** A number as text, with what it is exactly. */
const num = (value, shown, what) => h("span", { "data-value": value, "data-what": what }, shown(value));

/** columns: [title, right-aligned]. rows: of cells. */
function table(columns, rows, caption) {
  const head = columns.map(([title, right]) => h("th", { class: right ? "n" : null, scope: "col" }, title));
  const body = rows.map((row) => h("tr", row.attributes || {}, (row.cells || row).map(
    (cell, i) => h("td", { class: columns[i][1] ? "n" : null }, cell))));
  return h("div", { class: "scroll" }, h("table", { "aria-label": caption },
    h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}
const pairs = (list) => h("dl", { class: "pairs" }, list.filter((p) => p && p[1] !== null && p[1] !== undefined)
  .flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]));
const legend = (items) => h("div", { class: "legend" }, items.map(
  ([name, background]) => h("span", {}, h("i", { style: `background:${background}` }), name)));
const empty = (text, command) => h("div", { class: "panel empty" }, h("p", { style: "margin:0 auto 8px" }, text), command ? h("code", {}, command) : null);

/** A word of a shell's command. */
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const compileCommand = (plan) => `autopar compile ${quoted(plan.model)} --plan ${quoted(plan.folder)} -o ${quoted(plan.folder)}`;
const COLORS = 7; // of axes, see style.css
const axisColor = (axis) => {
  const place = DATA.axes.indexOf(axis);
  return `var(${place < 0 ? "--whole" : `--axis-${place % COLORS}`})`;
};
/** A colour of the page as the canvas takes it. */
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const tip = h("div", { class: "tip", role: "status" });
document.body.append(tip);
function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
}
const hideTip = () => { tip.style.display = "none"; };

/** What is drawn anew when its width or the colours change: [element, paint]. */
const redraws = [];
function redrawAll() {
  for (const [element, paint] of redraws) if (element.isConnected && element.offsetParent) paint();
}
const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) if (contentRect.width && contentRect.width !== target.drawnWidth) target.repaint();
});
function drawnIn(parent, element, paint) {
  const holder = h("div", {}, element);
  holder.repaint = () => { holder.drawnWidth = holder.clientWidth; paint(Math.max(240, holder.clientWidth)); };
  parent.append(holder);
  redraws.push([element, holder.repaint]);
  widths.observe(holder);
  holder.repaint();
  return holder.repaint;
}
/** A canvas as wide as its panel, in device pixels. draw(context, width, height). */
function canvasOf(parent, height, label, draw) {
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": label });
  const paint = drawnIn(parent, canvas, (width) => {
    const scale = window.devicePixelRatio || 1;
    const tall = typeof height === "function" ? height(width) : height;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, tall);
    draw(context, width, tall);
  });
  return { canvas, paint };
}
/** An SVG as wide as its panel. draw(selection, width). */
function chart(parent, height, label, draw) {
  const svg = d3.create("svg").attr("role", "img").attr("aria-label", label);
  drawnIn(parent, svg.node(), (width) => {
    svg.attr("width", width).attr("height", height).attr("viewBox", `0 0 ${width} ${height}`);
    svg.selectAll("*").remove();
    draw(svg, width);
  });
  return svg;
}
/** Decimal bytes on an axis: ticks at 1, 2 or 5 of a prefix. */
const byteTicks = (axis, n) => axis.ticks(n).tickFormat((v) => bytes(v));
/** Left and right move among siblings that match, Home and End to the ends. */
function roving(container, selector) {
  container.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.matches(selector)) return;
    const all = [...container.querySelectorAll(selector)];
    const next = all[all.indexOf(event.target) + step];
    if (next) { next.focus(); event.preventDefault(); }
  });
}
