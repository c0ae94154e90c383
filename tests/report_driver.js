// What tests/test_report.py does in a page, as the body of an async function.
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const found = { tabs: [], numbers: {} };
for (const tab of [...document.querySelectorAll("[role=tab]")].map((t) => t.id)) {
  document.getElementById(tab).click();
  await wait(50);
  const section = document.getElementById(tab.replace("tab", "view"));
  found.tabs.push([tab, section.offsetHeight, section.querySelectorAll("*").length]);
  for (const n of section.querySelectorAll("[data-what]")) {
    found.numbers[n.dataset.what] = [Number(n.dataset.value), n.textContent];
  }
}
document.getElementById("tab-model").click();
const row = document.querySelector(".row[data-layer='blocks.+i']") ||
  document.querySelector(".row[data-layer^=blocks]");
const linear = [...row.querySelectorAll(".cell")].find((c) => /linear/.test(c.textContent));
linear.dispatchEvent(new MouseEvent("mouseenter"));
found.hover = document.querySelector(".side").textContent;
const cells = row.querySelectorAll(".cell");
cells[0].focus();
cells[0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
found.focused = [...cells].indexOf(document.activeElement);
found.focus = document.querySelector(".side").textContent;
row.querySelector(".name button").click();
found.folded = [row.querySelectorAll(".cell").length, row.querySelectorAll(".tick").length];
document.getElementById("tab-schedule").click();
await wait(50);
const canvas = document.querySelector("#view-schedule canvas");
const ink = () => canvas.toDataURL().length;
const before = canvas.toDataURL();
canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
found.zoom = [Number(canvas.dataset.zoom), canvas.toDataURL() !== before];
document.getElementById("one-collective").click();
found.collective = [Number(canvas.dataset.zoom),
  document.querySelector("#view-schedule [aria-live]").textContent];
document.getElementById("tab-ranks").click();
await wait(50);
const mesh = document.querySelector("#view-ranks canvas");
mesh.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
found.rank = document.querySelector("#view-ranks h2").textContent;
found.code = document.querySelectorAll("#view-ranks .code").length;
found.marked = [...document.querySelectorAll("#view-ranks li.on")].map((l) => l.textContent);
found.priced = document.querySelectorAll("circle.priced").length;
return found;
