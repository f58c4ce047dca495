"use strict";
// Without this script the page lacks only the tooltips, sorting and the selection of a group.

// Tooltips: the values of all lines at the x nearest to the pointer, or chosen by the arrow keys.
for (const figure of document.querySelectorAll("[data-chart]")) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const cursor = plot.querySelector(".cursor");
  const [left, top, right, bottom] = chart.box;
  const [x0, x1, y0, y1] = chart.span;
  const userX = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
  const userY = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  figure.append(tip);
  plot.setAttribute("tabindex", "0");
  let shown = -1;  // index into chart.x

  const make = (kind, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const hide = () => {
    tip.hidden = true;
    shown = -1;
    cursor.replaceChildren();
  };
  const show = (index) => {
    shown = Math.max(0, Math.min(chart.x.length - 1, index));
    const x = userX(chart.x[shown]);
    const marks = [make("line", { x1: x, x2: x, y1: top, y2: bottom })];
    const head = document.createElement("strong");
    head.textContent = `${chart.xLabel} ${Number(chart.x[shown].toPrecision(4))} (${chart.yLabel})`;
    const rows = [head];
    const present = chart.series.filter((line) => line.y[shown] !== null);
    for (const line of present.sort((one, other) => other.y[shown] - one.y[shown])) {
      const value = line.y[shown];
      const row = document.createElement("div");
      const block = document.createElement("i");
      block.className = line.style;
      const name = document.createElement("span");
      name.textContent = line.name;
      const number = document.createElement("b");
      number.textContent = Number(value.toPrecision(4));
      row.append(block, name, number);
      rows.push(row);
      marks.push(make("circle", { cx: x, cy: userY(value), r: 3.2, class: `dot ${line.style}` }));
    }
    cursor.replaceChildren(...marks);
    tip.replaceChildren(...rows);
    tip.hidden = false;
    // Below the plot, so that no line is covered, and inside the figure.
    const box = plot.getBoundingClientRect();
    const wanted = (x / plot.viewBox.baseVal.width) * box.width - tip.offsetWidth / 2;
    tip.style.left = `${Math.max(0, Math.min(figure.clientWidth - tip.offsetWidth, wanted))}px`;
    tip.style.top = `${box.bottom - figure.getBoundingClientRect().top - 8}px`;
  };
  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    const pointer = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    let nearest = 0;
    chart.x.forEach((x, index) => {
      if (Math.abs(userX(x) - pointer) < Math.abs(userX(chart.x[nearest]) - pointer)) nearest = index;
    });
    if (nearest !== shown) show(nearest);
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(shown < 0 ? (step > 0 ? 0 : chart.x.length - 1) : shown + step);
  });
}

// Legends: press a group to show it alone, and again to show all.
for (const legend of document.querySelectorAll(".legend")) {
  const buttons = [...legend.querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const alone = button.getAttribute("aria-pressed") !== "true";
      for (const other of buttons) other.setAttribute("aria-pressed", String(alone && other === button));
      for (const mark of legend.closest("section").querySelectorAll(".plot [data-name]")) {
        mark.classList.toggle("faded", alone && mark.dataset.name !== button.dataset.name);
      }
    });
  }
}

// Tables: sort by a column, best value first, names alphabetically; empty cells stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const body = table.tBodies[0];
      const value = (row) => row.cells[column].dataset.value;
      const numeric = [...body.rows].every((row) => value(row) === "" || !Number.isNaN(Number(value(row))));
      const before = head.getAttribute("aria-sort");
      const descending = before === "none" ? numeric && head.dataset.better !== "lower" : before === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === "" || b === "") return (a === "") - (b === "");
        const order = numeric ? Number(a) - Number(b) : a.localeCompare(b);
        return descending ? -order : order;
      });
      body.append(...rows);
    });
  });
}
