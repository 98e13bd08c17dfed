// Sorts tables, filters tests and searches; without it the page shows everything.
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // --- sorting ---
  const value = (cell) => {
    const text = cell ? cell.textContent : "";
    const number = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // empty cells last
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return typeof a === "number" ? -1 : 1;
  };
  const sort = (heading) => {
    const table = heading.closest("table");
    const body = table.tBodies[0];
    const column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const text = column === 0 || heading.textContent === "type";
    const rows = [...body.rows].map((row) => [text ? row.cells[column].textContent : value(row.cells[column]), row]);
    const side = down ? -1 : 1;
    rows.sort(([a], [b]) => (a === "" || b === "" ? compare(a, b) : side * compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  const addButtons = (root) =>
    all("table.layers thead th:not(.plain)", root).forEach((heading) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = heading.title;
      button.append(...heading.childNodes);
      heading.removeAttribute("title");
      heading.append(button);
      button.addEventListener("click", () => sort(heading));
    });
  addButtons(document);

  // --- unfolding: what is in <noscript> becomes elements when it is first needed ---
  const unfold = (test) => {
    const kept = test.querySelector("noscript");
    if (!kept) return;
    kept.outerHTML = kept.textContent;
    addButtons(test);
  };
  const follow = () => {
    const test = document.getElementById(location.hash.replace(/^#[lt](\d+).*/, "t$1"));
    if (!test || !test.matches("details.test")) return;
    unfold(test);
    test.open = true;
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  };
  document.addEventListener("toggle", ({ target }) => target.matches(".test") && unfold(target), true);
  addEventListener("hashchange", follow);
  follow();

  // --- filter and search ---
  const bar = document.querySelector(".toolbar");
  if (!bar) return;
  const search = document.getElementById("search");
  const tests = all(".test").map((element) => ({ element, text: element.textContent.toLowerCase() }));
  let show = "all";
  const update = () => {
    const words = search.value.trim().toLowerCase();
    const wanted = {
      all: () => true,
      failed: (element) => element.classList.contains("bad"),
      found: (element) => element.dataset.found !== undefined,
    }[show];
    tests.forEach(({ element, text }) => (element.hidden = !wanted(element) || !text.includes(words)));
    document.getElementById("count").textContent = `${all(".test:not([hidden])").length} of ${tests.length} tests`;
  };
  search.addEventListener("input", update);
  const buttons = all("button", bar);
  buttons.forEach((button) =>
    button.addEventListener("click", () => {
      show = button.dataset.show;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      update();
    })
  );
  bar.addEventListener("submit", (event) => event.preventDefault());
  bar.hidden = false;
  update();
})();
