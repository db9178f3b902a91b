// Every view of a search that still runs has its content and its plots.

import { browse, input, record, until } from './page.mjs';
import { lookAtRunning } from './look.mjs';

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
  await lookAtRunning(await open());
});
