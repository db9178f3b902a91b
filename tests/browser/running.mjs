// Every view of a search that still runs has its content and its plots.

import { WIDE, base, browse, check, input, noFaults, record, until, visit } from './page.mjs';
import { look } from './look.mjs';
import { views } from './list.mjs';

// A random search has no rungs, and there is no other experiment to compare with.
const ABSENT = ['rungs', 'compare'];

/** Waits for trials that have ended, and selects a checkpoint that the search keeps. */
async function choose() {
  const ended = await until(() => {
    const all = [...record().values()].filter(({ status }) => status.phase === 'Completed'
      && status.checkpoints?.length);
    return all.length > 1 && all;
  }, 'two trials end');
  const { spec, status } = ended[0];
  Object.assign(input, { trial: spec.index, checkpoint: status.checkpoints.at(-1).name });
}

await browse(async (open) => {
  await choose();
  const page = await open(base());
  for (const view of views().filter(({ name }) => !ABSENT.includes(name))) {
    await visit(page, view.path);
    const plots = view.plots.filter((plot) => plot !== 'ladder');
    await look(page, { ...view, plots }, WIDE, 'light');
    noFaults(page);
  }
  const { phase } = await page.evaluate((path) => fetch(path).then((one) => one.json()),
    `${base()}/data.json`);
  check(phase === 'Running', `the search is ${phase}`);
});
