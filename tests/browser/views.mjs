// Each view of a finished search has its content and its plots: wide and narrow, light and dark.

import { NARROW, WIDE, browse, check, drawn, fits, noFaults, picture, scripts, visit }
  from './page.mjs';
import { views } from './list.mjs';

const PICTURES = { list: 'list', rungs: 'rungs', trial: 'trial', compare: 'compare' };

async function look(page, view, size, colorScheme) {
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

await browse(async (open) => {
  const page = await open();
  await scripts(page);
  for (const view of views()) {
    await page.setViewportSize(WIDE);
    await page.emulateMedia({ colorScheme: 'light' });
    await visit(page, view.path);
    await page.waitForSelector(view.has);
    await look(page, view, WIDE, 'light');
    if (PICTURES[view.name]) await picture(page, PICTURES[view.name]);
    if (view.name === 'overview') await picture(page, 'overview');
    await look(page, view, WIDE, 'dark');
    if (view.name === 'overview') await picture(page, 'overview-dark');
    await look(page, view, NARROW, 'dark');
    await look(page, view, NARROW, 'light');
    if (view.name === 'overview') await picture(page, 'narrow');
    noFaults(page);
  }
});
