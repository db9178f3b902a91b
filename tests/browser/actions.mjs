// The buttons of a local run, pressed by a user: pause, activate, cancel and delete.

import { existsSync } from 'node:fs';

import { answer, button, deleted, folder, landed, offers, phase, question, requested }
  from './buttons.mjs';
import { base, browse, check, equal, follow, noFaults, until, visit } from './page.mjs';

await browse(async (open) => {
  const page = await open(base());
  const all = ['Pause', 'Cancel…', 'Kill…'];
  await offers(page, all);
  await follow(page, button(page, 'Pause'), landed('paused'));
  equal(requested(), 'paused', 'request after Pause');
  await until(() => phase() === 'Paused', 'the trials pause');
  await offers(page, ['Activate', 'Cancel…', 'Kill…']);
  // The page reads the record a moment later.
  await page.waitForSelector('#phase[data-phase=Paused]');

  const effects = await question(page, 'Cancel');
  check(/\b1 (paused|waiting) trial closes\./.test(effects), `effects of Cancel: ${effects}`);
  await follow(page, page.locator('a', { hasText: 'Back, change nothing' }));
  equal(requested(), 'paused', 'request after Back');

  await follow(page, button(page, 'Activate'), landed('active'));
  equal(requested(), 'active', 'request after Activate');
  await until(() => phase() === 'Running', 'the trials continue');
  await offers(page, all);
  await question(page, 'Cancel');
  await answer(page, landed('cancelled'));
  equal(requested(), 'cancelled', 'request after Cancel');
  await until(() => phase() === 'Cancelled', 'the experiment ends');
  // A page that is loaded while the runner exits is not live.
  await offers(page, ['Delete…'], () => visit(page, base()));
  noFaults(page);

  const list = await open('/experiments');
  await question(page, 'Delete');
  await page.fill('input[name=name]', 'another');
  await answer(page);
  check((await page.innerText('[role=alert]')).includes('iris-random'), 'no reason is shown');
  check(existsSync(folder()), 'the run is deleted in spite of the wrong name');
  // The refusal is the response to the form.
  page.faults.splice(0);
  await page.fill('input[name=name]', 'iris-random');
  await answer(page, deleted);
  equal(new URL(page.url()).pathname, '/experiments', 'page after Delete');
  check(!existsSync(folder()), 'the record remains');
  for (const one of [page, list]) {
    const isGone = async () => !(await one.innerText('main')).includes('iris-random');
    await until(isGone, 'the run leaves the list');
    noFaults(one);
  }
});
