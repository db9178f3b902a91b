// Views in one size and color scheme.

import { WIDE, base, check, drawn, fits, noFaults, visit } from './page.mjs';
import { runningViews } from './list.mjs';

/** Fails unless a view has its content and its plots, and fits. */
export async function look(page, view, size, colorScheme) {
  const what = `${view.name}, ${size.width} px, ${colorScheme}`;
  await page.emulateMedia({ colorScheme });
  await page.setViewportSize(size);
  for (const plot of view.plots) await drawn(page, plot);
  await page.waitForSelector(view.has);
  const heading = await page.locator('h1').first().innerText();
  check(heading.trim() !== '', `${what} has no heading`);
  const ground = await page.evaluate(() => getComputedStyle(document.documentElement)
    .backgroundColor);
  const isDark = Number(ground.match(/\d+/)[0]) < 128;
  check(isDark === (colorScheme === 'dark'), `${what} has the ground ${ground}`);
  await fits(page, what);
  const failed = await page.locator('.plot-error').count();
  check(failed === 0, `${what} has ${failed} failed plots`);
}

/** Looks at all views of a search, which must not have ended after the last one. */
export async function lookAtRunning(page) {
  for (const view of runningViews()) {
    await visit(page, view.path);
    await look(page, view, WIDE, 'light');
    noFaults(page);
  }
  const { phase } = await page.evaluate((path) => fetch(path).then((one) => one.json()),
    `${base()}/data.json`);
  // A search is pending between two trials.
  check(['Pending', 'Running'].includes(phase), `the search is ${phase}`);
}
