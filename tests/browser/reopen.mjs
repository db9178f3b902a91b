// A user pauses and kills a local run, continues the failed trial of another one, and deletes both.

import { existsSync } from 'node:fs';

import { answer, deleted, folder, landed, offers, phase, question, requested }
  from './buttons.mjs';
import {
  ask, base, browse, check, equal, follow, input, noFaults, record, until, visit,
} from './page.mjs';
import { faultsOf, noneOf } from './faults.mjs';

const trial = () => record(input.failed).get(0).status;

/** Selects all experiments of the list, and opens the question before an action on them. */
async function questionOfAll(page, title) {
  await visit(page, '/experiments');
  await page.check('[data-select-all]');
  await follow(page, page.locator('[data-selection-bar] button', { hasText: title }));
  noneOf(await faultsOf(page, `question ${title}`));
  return page.innerText('h1');
}

/** Only the running experiment can pause. */
async function pauseAll(page) {
  equal(await questionOfAll(page, 'Pause'), 'Pause 1 experiment?', 'question before Pause');
  const refused = await page.innerText('#refused');
  check(refused.includes('The state of the experiment does not allow it'), `refused: ${refused}`);
  await answer(page, landed('paused', '/experiments'));
  equal(new URL(page.url()).pathname, '/experiments', 'page after Pause');
  equal(requested(), 'paused', 'request after Pause');
  await until(() => phase() === 'Paused', 'the trials pause');
}

async function deleteAll(page) {
  equal(await questionOfAll(page, 'Delete'), 'Delete 2 experiments?', 'question before Delete');
  await page.fill('input[name=confirmation]', 'delete');
  await answer(page);
  check((await page.innerText('[role=alert]')).includes('delete 2'), 'no reason is shown');
  check(existsSync(folder()) && existsSync(folder(input.failed)), 'a run is deleted');
  // The refusal is the response to the form.
  page.faults.splice(0);
  await page.fill('input[name=confirmation]', 'delete 2');
  await answer(page, deleted);
  check(!existsSync(folder()) && !existsSync(folder(input.failed)), 'a record remains');
  noFaults(page);
}

/** Hides each column of the list in turn: its title and its cells go together. */
async function columns(page) {
  const rows = () => page.$$eval('#experiments-table tr', (all) => all.map((row) =>
    [...row.cells].map((cell) => (cell.querySelector('time') ? 'age' : cell.textContent.trim()))));
  await visit(page, '/experiments');
  const full = await rows();
  const names = ['trials', 'best', 'metric', 'search', 'slots', 'hours', 'labels', 'age'];
  for (const [i, name] of names.entries()) {
    await visit(page, `/experiments?hidden=${name}`);
    const without = full.map((row) => row.filter((_, column) => column !== i + 3));
    equal(await rows(), without, `list without ${name}`);
  }
}

await browse(async (open) => {
  const page = await open();
  await pauseAll(page);
  await until(async () => {
    await visit(page, base());
    return page.locator('#phase[data-phase=Paused]').count();
  }, 'the page shows the pause');
  await offers(page, ['Activate', 'Cancel…', 'Kill…']);
  const effects = await question(page, 'Kill');
  check(effects.includes('A killed experiment cannot continue.'), `effects of Kill: ${effects}`);
  await answer(page, landed('killed'));
  equal(requested(), 'killed', 'request after Kill');
  await until(() => phase() === 'Cancelled', 'the experiment ends');
  // A page that is loaded while the runner exits is not live.
  await offers(page, ['Delete…'], () => visit(page, base()));
  noFaults(page);

  equal(phase(input.failed), 'Failed', 'phase without the data');
  await visit(page, base(input.failed));
  await offers(page, ['Continue…', 'Delete…']);
  equal(await page.locator('[data-live-state]').count(), 0, 'state of an ended run');
  check(await page.locator('#errors').isVisible(), 'the page shows no error');
  await columns(page);
  await visit(page, base(input.failed));
  await page.click('text=First error in the logs');
  const shown = page.locator('#first-error .log-line.error').first();
  await shown.waitFor();
  check(await shown.evaluate((line) => line.getBoundingClientRect().bottom <= innerHeight),
    'the link does not scroll to the first error');
  const next = await question(page, 'Continue');
  check(next.includes('when `stoker run FILE` runs again'), `effects of Continue: ${next}`);
  // Without a choice, only trials that have stopped continue.
  await answer(page);
  check((await page.innerText('[role=alert]')).includes('failed'), 'no reason is shown');
  // The refusal is the response to the form.
  page.faults.splice(0);
  await page.check('input[name=trials][value=failed]');
  await answer(page);
  noFaults(page);
  const paths = [base(input.failed), `${base(input.failed)}/trials/0`];
  const pages = [page, await open(paths[0]), await open(paths[1])];
  for (const one of pages) {
    equal(await one.locator('[data-live-state=live]').count(), 1, `live state of ${one.url()}`);
  }
  await ask('run');
  equal([phase(input.failed), trial().phase], ['Completed', 'Completed'], 'phases with the data');
  for (const one of pages) await one.waitForSelector('#phase[data-phase=Completed]');
  // The logs on the page of the trial are those of its new attempt.
  const logs = pages[2].locator('#logs');
  await logs.locator('option[value="1"][selected]').waitFor({ state: 'attached' });
  await logs.locator('[data-logs]', { hasText: 'validation batches=' }).waitFor();
  await page.waitForSelector('#errors', { state: 'hidden' });
  await page.waitForSelector('#first-error', { state: 'hidden' });
  pages.forEach(noFaults);
  for (const one of pages.slice(1)) await one.close();
  // The server sees a moment later that the runner has exited.
  // A completed trial cannot continue.
  await offers(page, ['Delete…'], () => visit(page, base(input.failed)));
  await deleteAll(page);
});
