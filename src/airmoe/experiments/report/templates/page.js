"use strict";
// Tables sort by their headings: the first press ascending, the next one the other way round.
// Numbers compare as numbers, cells without one stay last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => ({ row, cell: row.cells[column] }));
      const numeric = rows.some(({ cell }) => "value" in cell.dataset);
      rows.sort((one, other) => {
        if (!numeric) {
          const order = one.cell.textContent.localeCompare(other.cell.textContent);
          return up ? order : -order;
        }
        const [a, b] = [one, other].map(({ cell }) =>
          "value" in cell.dataset ? Number(cell.dataset.value) : NaN);
        if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);
        return up ? a - b : b - a;
      });
      body.append(...rows.map(({ row }) => row));
    });
  });
}
// On paper nothing is folded.
const folded = new Set();
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    folded.add(part);
    part.open = true;
  }
});
addEventListener("afterprint", () => {
  for (const part of folded) part.open = false;
  folded.clear();
});
