// Opens a report in Chromium: no message, no request, keyboard, sorting, search, filters, accessibility, pictures.
// Usage: node check.mjs CHROMIUM MODULES REPORT.html PICTURES; prints each failure and exits with 1 if there is one.
import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [executablePath, modules, report, pictures] = process.argv.slice(2);
const require = createRequire(path.join(path.resolve(modules), "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const failures = [];
const expect = (holds, what) => holds || failures.push(what);
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath, args });
mkdirSync(pictures, { recursive: true });

const open = async (options) => {
  const page = await browser.newPage(options);
  page.on("console", (message) => failures.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => failures.push(`error: ${error}`));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith("data:") && url !== pathToFileURL(report).href) failures.push(`request: ${url}`);
  });
  const start = Date.now();
  await page.goto(pathToFileURL(report).href);
  return { page, milliseconds: Date.now() - start };
};

// --- appearance, overflow and accessibility ---
for (const colorScheme of ["light", "dark"]) {
  for (const width of [1280]) {
    const kind = `${colorScheme}-${width}`;
    const { page, milliseconds } = await open({ colorScheme, viewport: { width, height: 900 } });
    console.log(`${kind}: opened in ${milliseconds} ms`);
    const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    expect(over <= 0, `${kind}: the page is ${over} pixels too wide`);
    await page.screenshot({ path: path.join(pictures, `${kind}.png`) });
    await page.evaluate(() => document.querySelectorAll(".test").forEach((test, i) => (test.open ||= i < 5)));
    await page.waitForFunction(() => !document.querySelector(".test[open] noscript"));
    const cut = await page.evaluate(() =>
      [...document.querySelectorAll("body *:not(.scroll, pre, svg *)")]
        .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline")
        .filter((e) => !e.parentElement.closest(".scroll, pre") && !e.matches(".skip"))
        .map((e) => `${e.tagName}.${e.className}`)
    );
    expect(!cut.length, `${kind}: cut: ${cut}`);
    const rows = await page.evaluate(() => new Set([...document.querySelectorAll(".tiles li")].map((e) => e.offsetTop)).size);
    expect(rows === 1, `${kind}: the tiles are in ${rows} rows`);
    {
      const out = await page.evaluate(() =>
        [...document.querySelectorAll(".run table.layers thead th")]
          .filter((e) => /^(dead|gradient)/.test(e.textContent) && e.closest(".scroll").clientWidth)
          .filter((e) => e.getBoundingClientRect().right > e.closest(".scroll").getBoundingClientRect().right)
          .map((e) => e.textContent)
      );
      expect(!out.length, `${kind}: columns out of sight: ${out}`);
    }
    const low = await page.evaluate(() =>
      [...document.querySelectorAll("pre, .run.caused .scroll:not(.charts *)")]
        .filter((e) => e.clientHeight && e.scrollHeight > e.clientHeight + 1)
        .map((e) => e.ariaLabel ?? e.textContent.slice(0, 40))
    );
    expect(!low.length, `${kind}: a scroll box cuts ${low}`);
    await page.locator(".test").first().screenshot({ path: path.join(pictures, `${kind}-test.png`) });
    await page.evaluate(axe);
    const found = await page.evaluate(async () => (await window.axe.run()).violations);
    for (const { impact, id, nodes } of found) failures.push(`${kind}: axe: ${impact} ${id}: ${nodes[0].html.slice(0, 200)}`);
    await page.close();
  }
}

// --- with the script ---
const { page } = await open({ viewport: { width: 1360, height: 900 } });
const shown = () => page.locator(".test:visible").count();
const all = await shown();
await page.keyboard.press("Tab");
expect((await page.evaluate(() => document.activeElement.className)) === "skip", "the first stop is the skip link");
await page.locator("#search").fill("nothing is called this");
expect((await shown()) === 0, "a search without a hit hides every test");
expect((await page.locator("#count").textContent()).startsWith("0 of"), "the number of tests is said");
const folded = page.locator(".test", { has: page.locator("noscript") }).first();
await page.locator("#search").fill("folded.fc");
expect((await shown()) === 1, "a search finds the layers of folded tests");
await page.locator("#search").fill("");
const id = await folded.evaluate((test) => test.id);
await page.evaluate((hash) => (location.hash = hash), `#${id.replace("t", "l")}.0`);
await page.waitForTimeout(200);
expect(await page.locator(`#${id.replace("t", "l")}\\.0`).isVisible(), "a link to a layer unfolds its test");
expect((await shown()) === all, "an empty search shows every test");
await page.getByRole("button", { name: "Failed" }).press("Enter");
expect((await shown()) === (await page.locator(".test.bad").count()), "the filter shows the failed tests");
expect((await page.getByRole("button", { name: "Failed" }).getAttribute("aria-pressed")) === "true", "the filter is pressed");
await page.getByRole("button", { name: /^All/ }).press("Enter");
await page.evaluate(() => document.querySelectorAll(".test").forEach((test) => (test.open = true)));
const table = page.locator("table.layers", { has: page.locator("th", { hasText: "mean" }) }).first();
const heading = table.locator("thead th", { hasText: "mean" });
const column = async () => {
  const index = await heading.evaluate((cell) => cell.cellIndex);
  const texts = await table.locator("tbody tr").evaluateAll((rows, i) => rows.map((row) => row.cells[i].textContent), index);
  return texts.filter(Boolean).map(Number);
};
for (const [order, sign] of [["ascending", 1], ["descending", -1]]) {
  await heading.getByRole("button").press("Enter");
  expect((await heading.getAttribute("aria-sort")) === order, `aria-sort is ${order}`);
  const numbers = await column();
  expect(numbers.every((n, i) => !i || sign * (n - numbers[i - 1]) >= 0), `the column is ${order}`);
}
const test = page.locator(".test > summary").first();
await test.press("Enter");
expect(!(await page.locator(".test").first().evaluate((element) => element.open)), "Enter folds a test");
await page.close();

// --- without it ---
const still = await open({ javaScriptEnabled: false, viewport: { width: 1360, height: 900 } });
expect((await still.page.locator(".toolbar:visible").count()) === 0, "without the script there are no controls");
expect((await still.page.locator(".test:visible").count()) === all, "without the script every test is there");
await still.page.locator(".test > summary").last().click();
expect(await still.page.locator(".test").last().getAttribute("open") !== null, "without the script a test unfolds");
await browser.close();

failures.forEach((failure) => console.log(`FAILED ${failure}`));
process.exit(failures.length ? 1 : 0);
