"use strict";
const views = [];

function columns(width) {
  return width < 420 ? 2 : width < 640 ? 3 : 5;
}

async function draw(holder) {
  const spec = JSON.parse(document.getElementById(holder.id + "-spec").textContent);
  spec.config.legend.columns = columns(holder.clientWidth);
  try {
    const drawn = await vegaEmbed(holder, spec, { mode: "vega-lite", renderer: "svg", actions: false });
    views.push(drawn.view);
    holder.dataset.drawn = "yes";
  } catch (error) {
    holder.textContent = "This figure could not be drawn: " + error.message;
    console.error(error);
  }
}

function choose() {
  const hidden = [...document.querySelectorAll("#shown input:not(:checked)")].map((box) => box.value);
  for (const view of views) {
    if ("hidden" in view.getState().signals) view.signal("hidden", hidden).runAsync();
  }
}

function number(text) {
  const found = parseFloat(text.replace("−", "-"));
  return Number.isNaN(found) ? -Infinity : found;
}

function sort(button) {
  const head = button.parentElement, row = head.parentElement, body = row.closest("table").tBodies[0];
  const place = [...row.children].indexOf(head), up = head.getAttribute("aria-sort") !== "ascending";
  const text = (line) => line.children[place].textContent;
  const numeric = [...body.rows].some((line) => /^[-+−]?\d/.test(text(line)));
  const order = (a, b) => (numeric ? number(text(a)) - number(text(b)) : text(a).localeCompare(text(b)));
  body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
  for (const other of row.children) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}

for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => sort(button));
}
for (const box of document.querySelectorAll("#shown input")) box.addEventListener("change", choose);
Promise.all([...document.querySelectorAll(".chart")].map(draw)).then(() => {
  document.body.dataset.ready = "yes";
});
