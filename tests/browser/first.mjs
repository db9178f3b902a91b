// The list without experiments shows the first one once it exists.

import { ask, browse, noFaults } from './page.mjs';

await browse(async (open) => {
  const page = await open('/experiments');
  await page.waitForSelector('#first-title');
  await ask('start');
  await page.waitForSelector('#experiments-rows tr');
  noFaults(page);
});
