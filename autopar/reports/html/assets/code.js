// Emitted code beside the model's own source.
/** file and line that an emitted line names, if it does. */
function placeOf(line) {
  const match = /  # .*?([\w.-]+\.py):(\d+)/.exec(line);
  return match ? [match[1], +match[2]] : null;
}
function sourceLine(plan, place) {
  const file = place && plan.sources && plan.sources[place[0]];
  return file ? (file.text.split("\n")[place[1] - 1] || "").trim() : null;
}
/** A listing. mark: lines that stand out; pick(number): a line was clicked. */
function listing(text, label, pick = null) {
  const list = h("ol");
  text.split("\n").forEach((line, i) => {
    const [code, ...note] = line.split("  # ");
    const item = h("li", { "data-line": i + 1 }, h("span", {}, String(i + 1)), code,
      note.length ? h("em", { class: "note", style: "font-style:normal" }, `  # ${note.join("  # ")}`) : null);
    if (pick && placeOf(line)) {
      item.setAttribute("tabindex", "-1");
      item.addEventListener("click", () => pick(i + 1, line));
      item.addEventListener("keydown", (e) => { if (e.key === "Enter") pick(i + 1, line); });
    }
    list.append(item);
  });
  const first = list.querySelector("[tabindex]");
  if (first) first.setAttribute("tabindex", "0");
  const box = h("div", { class: "code", role: "region", "aria-label": label, tabindex: "0" }, list);
  roving(box, "li");
  return box;
}
function markLine(box, number) {
  for (const line of box.querySelectorAll("li.on")) line.classList.remove("on");
  const line = box.querySelector(`li[data-line="${number}"]`);
  if (!line) return;
  line.classList.add("on");
  box.scrollTop = line.offsetTop - box.offsetTop - box.clientHeight / 3;
}
/** Two panes: what a rank runs, and the model's file; a line on the left marks one on the right. */
function codePanes(plan, text, title) {
  const right = h("div");
  let shown = null, pane = null;
  const showSource = (place) => {
    const file = plan.sources && plan.sources[place[0]];
    if (shown !== place[0]) {
      shown = place[0];
      pane = file ? listing(file.text, file.path) : h("p", { class: "soft" }, `${place[0]} was not found here.`);
      right.replaceChildren(h("h3", {}, file ? file.path : place[0], h("span", { class: "soft" }, " as it is now")), pane);
    }
    if (file) markLine(pane, place[1]);
  };
  const left = listing(text, title, (number, line) => { markOnly(left, number); showSource(placeOf(line)); });
  const markOnly = (box, number) => {
    for (const line of box.querySelectorAll("li.on")) line.classList.remove("on");
    box.querySelector(`li[data-line="${number}"]`).classList.add("on");
  };
  const lines = text.split("\n");
  const start = lines.findIndex((l) => l.startsWith("def forward"));
  const first = lines.findIndex((l, i) => i > start && placeOf(l));
  const panes = h("div", { class: "halves" }, h("div", {}, h("h3", {}, title), left), right);
  if (first >= 0) {
    markOnly(left, first + 1);
    showSource(placeOf(lines[first]));
    requestAnimationFrame(() => { markLine(left, first + 1); showSource(placeOf(lines[first])); });
  }
  return panes;
}
