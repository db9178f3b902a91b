// Each view of a finished search has its content and its plots: wide and narrow, light and dark.

import { NARROW, WIDE, browse, check, equal, noFaults, picture, scripts, visit } from './page.mjs';
import { look } from './look.mjs';
import { views } from './list.mjs';

const PICTURES = { list: 'list', rungs: 'rungs', trial: 'trial', compare: 'compare' };

/** Times are local; the document and the titles have those of the server. */
async function times(page) {
  const shown = await page.locator('time > span').evaluateAll((places) => places.map((place) => {
    const { dateTime, title } = place.parentElement;
    const time = new Date(dateTime).toLocaleTimeString('en-GB');
    return [place.shadowRoot?.textContent.endsWith(time), place.textContent.endsWith('UTC'),
      title === dateTime];
  }));
  check(shown.length > 0, `${page.url()} has no times`);
  for (const one of shown) equal(one, [true, true, true], 'local, UTC, title');
}

await browse(async (open) => {
  const page = await open();
  await scripts(page);
  for (const view of views()) {
    await page.setViewportSize(WIDE);
    await page.emulateMedia({ colorScheme: 'light' });
    await visit(page, view.path);
    await page.waitForSelector(view.has);
    if (view.name === 'trial attempts') await times(page);
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
