// How long Chromium takes to open a page, in a window that has shown another one.
//
//     node open.mjs CHROMIUM FOLDER_OF_NODE_MODULES ROUNDS PAGE...
//
// Prints a JSON list for each page: milliseconds until the first paint, and until the page can be used, of each round.

import { createRequire } from "node:module";
import path from "node:path";

const [executablePath, folder, rounds, ...pages] = process.argv.slice(2);
const { chromium } = createRequire(path.join(path.resolve(folder), "package.json"))("playwright-core");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const found = pages.map(() => []);
for (let round = 0; round < Number(rounds); round++) {
  for (const [i, file] of pages.entries()) {
    const page = await browser.newPage({ viewport: { width: 1360, height: 900 } });
    await page.goto("about:blank");
    await page.goto(`file://${path.resolve(file)}`);
    const times = await page.evaluate(async () => {
      while (!performance.getEntriesByName("first-contentful-paint").length)
        await new Promise((resolve) => requestAnimationFrame(resolve));
      const [navigation] = performance.getEntriesByType("navigation");
      const [paint] = performance.getEntriesByName("first-contentful-paint");
      return [paint.startTime, navigation.domInteractive];
    });
    found[i].push(times);
    await page.close();
  }
}
await browser.close();
console.log(JSON.stringify(found));
