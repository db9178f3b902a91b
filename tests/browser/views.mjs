// Each view of a finished search has its content and its plots: wide and narrow, light and dark.

import { NARROW, WIDE, browse, noFaults, picture, scripts, visit } from './page.mjs';
import { look } from './look.mjs';
import { views } from './list.mjs';

const PICTURES = { list: 'list', rungs: 'rungs', trial: 'trial', compare: 'compare' };

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
