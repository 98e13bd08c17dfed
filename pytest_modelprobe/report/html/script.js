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
  let changed = () => {};
  const unfold = (test) => {
    const kept = test.querySelector("noscript");
    if (!kept) return;
    kept.outerHTML = kept.textContent;
    addButtons(test);
    changed(test);
  };
  const follow = () => {
    const test = document.getElementById(location.hash.replace(/^#[lt](\d+).*/, "t$1"));
    if (!test || !test.matches("details.test")) return;
    unfold(test);
    test.open = true;
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  };
  document.addEventListener("toggle", ({ target }) => target.matches(".test") && unfold(target), true);
  addEventListener("beforeprint", () => all(".test").forEach(unfold));
  addEventListener("hashchange", follow);
  follow();

  // --- filters and search ---
  const bar = document.querySelector(".toolbar");
  if (bar) {
    const tests = all(".test").map((element) => ({ element, id: element.querySelector(".id").textContent.toLowerCase() }));
    const search = document.getElementById("search");
    const marked = document.getElementById("marked");
    const count = document.getElementById("count");
    const buttons = all("button", bar);
    let rows = null; // read when they are first needed
    let show = "all";
    const read = ({ element }) => {
      const kept = element.querySelector("noscript");
      if (kept) return kept.textContent.split("<tr id=").slice(1).map(readText);
      return all("table.layers > tbody > tr", element).map((row) => ({
        row,
        text: [...row.cells].slice(0, 3).map((cell) => cell.textContent).join(" ").toLowerCase(),
        marked: row.querySelector("b[class]") !== null,
      }));
    };
    const references = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };
    const readText = (source) => {
      const cells = source.split(/<t[dh][^>]*>/).slice(1, 4).join(" ").replace(/<[^>]*>/g, "");
      const text = cells.replace(/&([^;]+);/g, (whole, name) => references[name] ?? whole).toLowerCase();
      return { row: {}, text, marked: source.includes("<b class") };
    };
    const update = () => {
      const words = search.value.trim().toLowerCase();
      if ((words || marked.checked) && !rows) rows = tests.map(read);
      let shown = 0;
      let layers = 0;
      const found = [];
      tests.forEach((test, i) => {
        const { element } = test;
        const named = !words || test.id.includes(words);
        let hits = 0;
        (rows ? rows[i] : []).forEach((layer) => {
          const hit = (named || layer.text.includes(words)) && (!marked.checked || layer.marked);
          if (layer.row.hidden === hit) layer.row.hidden = !hit;
          hits += hit;
        });
        const wanted =
          show === "all" ||
          (show === "failed" ? element.classList.contains("bad") : element.dataset.found !== undefined);
        const visible = wanted && (named || hits > 0) && (!marked.checked || hits > 0);
        element.hidden = !visible;
        if (visible) {
          shown += 1;
          layers += hits;
          if (words && !named) found.push(element);
        }
      });
      if (found.length <= 3) found.forEach((element) => (element.open = true));
      const what = words || marked.checked ? `, ${layers.toLocaleString("en")} layers` : "";
      count.textContent = `${shown} of ${tests.length} tests${what}`;
    };
    changed = (element) => {
      if (!rows) return;
      const i = tests.findIndex((test) => test.element === element);
      rows[i] = read(tests[i]);
      update();
    };
    let waiting = 0;
    search.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(update, 120);
    });
    marked.addEventListener("change", update);
    buttons.forEach((button) =>
      button.addEventListener("click", () => {
        show = button.dataset.show;
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        update();
      })
    );
    bar.addEventListener("submit", (event) => event.preventDefault());
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !event.target.closest("input")) {
        event.preventDefault();
        search.focus();
      }
    });
    bar.hidden = false;
    update();
  }
})();
