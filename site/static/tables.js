// Sorting of tables and copying of commands. Pages are complete without it.
"use strict";
(function () {
  const MULTIPLES = { k: 1e3, M: 1e6, B: 1e9, T: 1e12, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };

  // "−1.2 MiB" -> number; NaN for words.
  function valueOf(text) {
    const match = text.trim().replace(/\u2212/g, "-").replace(/\u2009/g, "")
      .match(/^([+-]?[\d.]+(?:e[+-]?\d+)?)[\s\u00a0]?([A-Za-z]*)/);
    return match ? parseFloat(match[1]) * (MULTIPLES[match[2]] || 1) : NaN;
  }

  function compare(a, b) {
    const x = valueOf(a), y = valueOf(b);
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return a.localeCompare(b);
  }

  function sortBy(table, column, head) {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    rows.sort((a, b) => (down ? -1 : 1) * compare(a.cells[column].textContent, b.cells[column].textContent));
    body.append(...rows);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
      if (head.classList.contains("no-sort")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sortBy(table, column, head));
      head.append(button);
    });
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        // Where the clipboard is closed to pages, the command is selected for the reader to copy.
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
    });
  }
})();
