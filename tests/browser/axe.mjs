// axe finds no serious or critical fault: wide and light, narrow and dark.

import { NARROW, WIDE, browse, drawn, scripts, visit } from './page.mjs';
import { faultsOf, noneOf } from './faults.mjs';
import { views } from './list.mjs';

await browse(async (open) => {
  const page = await open();
  await scripts(page);
  const all = [];
  for (const view of views()) {
    for (const [size, colorScheme] of [[WIDE, 'light'], [NARROW, 'dark']]) {
      await page.setViewportSize(size);
      await page.emulateMedia({ colorScheme });
      await visit(page, view.path);
      await page.waitForSelector(view.has);
      for (const plot of view.plots) await drawn(page, plot);
      all.push(...await faultsOf(page, `${view.name}, ${size.width} px, ${colorScheme}`));
    }
  }
  noneOf(all);
});
