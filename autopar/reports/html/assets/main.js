// The frame: header, tabs, themes, and which view is shown.
function facts(plan) {
  const run = plan.step && plan.step.run;
  const rows = [];
  if (plan.mesh) rows.push(["mesh", plan.mesh.axes.map(([a, n]) => `${a}=${n}`).join(", ") || "one rank"], ["ranks", String(plan.mesh.size)]);
  if (run) {
    rows.push(["a step, predicted", num(run.seconds, seconds, "step.seconds")]);
    rows.push(["pipeline idle", num(run.bubble, percent, "step.bubble")]);
    rows.push(["peak of a rank", num(Math.max(...run.peak), bytes, "step.peak")]);
  }
  if (plan.choice) rows.push(["MFU, predicted", num(plan.choice.explain.mfu, percent, "mfu")]);
  if (plan.inspect) {
    const proof = plan.inspect.proof;
    rows.push(["proof", proof ? "proved" : "not proved"]);
  }
  return rows;
}
function drawHeader() {
  const plan = DATA.plans[state.plan];
  const pick = DATA.plans.length > 1 ? h("select", { "aria-label": "Plan", onchange: (e) => { state.plan = +e.target.value; redrawFrame(); } },
    DATA.plans.map((p, i) => h("option", { value: i, selected: i === state.plan }, `${"AB"[i]}: ${p.name}`))) : null;
  const [model, ...sizes] = (plan.model || "").split("?");
  const theme = h("button", { onclick: toggleTheme, title: "Light or dark (t)" }, "Light / dark");
  const print = h("button", { onclick: () => window.print() }, "Print");
  document.getElementById("top").replaceChildren(
    h("div", {}, h("h1", {}, model || plan.name, h("small", {}, model ? plan.name : "")),
      sizes.length ? h("div", { class: "soft mono" }, sizes.join("?").replaceAll(",", ", ")) : null,
      h("div", { class: "soft" }, (plan.title || "").replace(`${plan.model}: `, "").replace(`${plan.model} on `, "on ")),
      (plan.warnings || []).map((w) => h("div", { class: "soft" }, w)),
      h("dl", { class: "facts" }, facts(plan).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))))),
    h("div", { class: "actions" }, pick, theme, print));
}
function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  redrawAll();
}
function drawTabs() {
  const shown = shownViews();
  document.getElementById("tabs").replaceChildren(...shown.map((v, i) => h("button", {
    role: "tab", id: `tab-${v.id}`, "aria-selected": v.id === state.view ? "true" : "false", tabindex: v.id === state.view ? 0 : -1,
    "aria-controls": `view-${v.id}`, title: `${i + 1}`, onclick: () => show(v.id) }, v.title)));
}
/** Views are made when they are first shown, or printed. */
function make(view) {
  const main = document.getElementById("view");
  let section = document.getElementById(`view-${view.id}`);
  if (!section) {
    section = h("section", { class: "view", id: `view-${view.id}`, role: "tabpanel", "aria-labelledby": `tab-${view.id}`, "data-title": view.title });
    main.append(section);
  }
  return section;
}
function fill(view, section) {
  if (section.dataset.made) return;
  section.dataset.made = "1";
  view.render(section, DATA.plans[state.plan]);
}
function show(id, focus = false) {
  state.view = id;
  hideTip();
  for (const view of views) {
    const section = make(view);
    section.classList.toggle("on", view.id === id);
    if (view.id === id) fill(view, section);
  }
  drawTabs();
  redrawAll();
  if (location.hash !== `#${id}`) history.replaceState(null, "", `#${id}`);
  if (focus) document.getElementById(`tab-${id}`).focus();
}
function redrawFrame() {
  document.getElementById("view").replaceChildren();
  redraws.length = 0;
  drawHeader();
  show(shownView(state.view));
}
const shownViews = () => views.filter((v) => !v.only || v.only());
/** The view that was asked for, if this plan has it, else its first. */
const shownView = (id) => (shownViews().find((v) => v.id === id) || shownViews()[0]).id;
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const shown = shownViews();
  const at = shown.findIndex((v) => v.id === state.view);
  if (event.key === "t") toggleTheme();
  else if (/^[1-9]$/.test(event.key) && shown[event.key - 1]) show(shown[event.key - 1].id);
  else if (event.target.matches("[role=tab]") && ["ArrowRight", "ArrowLeft"].includes(event.key)) {
    const next = shown[(at + (event.key === "ArrowRight" ? 1 : shown.length - 1)) % shown.length];
    show(next.id, true);
  }
});
addEventListener("hashchange", () => show(shownView(location.hash.slice(1))));
addEventListener("beforeprint", () => {
  document.documentElement.dataset.theme = "light";
  for (const view of shownViews()) { const s = make(view); s.classList.add("on"); fill(view, s); }
  redrawAll();
});
addEventListener("afterprint", () => show(state.view));
if (!document.documentElement.dataset.theme) {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}
drawHeader();
show(shownView(location.hash.slice(1)));
document.documentElement.dataset.ready = "1";
