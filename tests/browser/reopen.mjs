// A user kills a local run, and continues the failed trial of another one.

import { answer, offers, phase, question, requested } from './buttons.mjs';
import {
  ask, base, browse, check, equal, input, noFaults, record, until, visit,
} from './page.mjs';

const trial = () => record(input.failed).get(0).status;

await browse(async (open) => {
  const page = await open(base());
  await offers(page, ['Pause', 'Cancel…', 'Kill…']);
  const effects = await question(page, 'Kill');
  check(effects.includes('A killed experiment cannot continue.'), `effects of Kill: ${effects}`);
  await answer(page);
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
  await page.waitForSelector('#errors', { state: 'hidden' });
  noFaults(page);
});
