// The buttons of a local run, pressed by a user: pause, activate, cancel and delete.

import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';

import { base, browse, check, equal, follow, input, noFaults, until, visit } from './page.mjs';

const folder = join(input.root, 'local', input.id);
const read = (name) => JSON.parse(readFileSync(join(folder, 'record', name), 'utf8'));
const experiment = () => read('experiment.json');
/** Returns the state that the page has requested. The runner reads it some time later. */
const requested = () => read('request.json').state;

/** Waits until the page has exactly these buttons. */
async function offers(page, expected, between = async () => {}) {
  let titles = [];
  const same = async () => {
    await between();
    titles = await page.locator('#actions button, #actions a').allInnerTexts();
    return JSON.stringify(titles) === JSON.stringify(expected);
  };
  await until(same, `the buttons ${expected.join(', ')}`).catch((error) => {
    throw new Error(`${error.message}; the page has ${titles.join(', ')}`);
  });
}

const button = (page, title) =>
  page.locator('#actions button, #actions a', { hasText: new RegExp(`^${title}…?$`) });

/** Opens the question before an action, and returns its text. */
async function question(page, title) {
  await follow(page, button(page, title));
  return page.innerText('.effects');
}

const answer = (page) => follow(page, page.locator('form.confirm button'));

await browse(async (open) => {
  const page = await open(base());
  const all = ['Pause', 'Cancel…', 'Kill…'];
  await offers(page, all);
  await follow(page, button(page, 'Pause'));
  equal(requested(), 'paused', 'request after Pause');
  await until(() => experiment().status.phase === 'Paused', 'the trials pause');
  await offers(page, ['Activate', 'Cancel…', 'Kill…']);
  // The page reads the record a moment later.
  await page.waitForSelector('#phase[data-phase=Paused]');

  const effects = await question(page, 'Cancel');
  check(/\b1 (paused|waiting) trial closes\./.test(effects), `effects of Cancel: ${effects}`);
  await follow(page, page.locator('a', { hasText: 'Back, change nothing' }));
  equal(requested(), 'paused', 'request after Back');

  await follow(page, button(page, 'Activate'));
  equal(requested(), 'active', 'request after Activate');
  await until(() => experiment().status.phase === 'Running', 'the trials continue');
  await offers(page, all);
  await question(page, 'Cancel');
  await answer(page);
  equal(requested(), 'cancelled', 'request after Cancel');
  await until(() => experiment().status.phase === 'Cancelled', 'the experiment ends');
  // A page that is loaded while the runner exits is not live.
  await offers(page, ['Delete…'], () => visit(page, base()));
  noFaults(page);

  const list = await open('/experiments');
  await question(page, 'Delete');
  await page.fill('input[name=name]', 'another');
  await answer(page);
  check((await page.innerText('[role=alert]')).includes('iris-random'), 'no reason is shown');
  check(existsSync(folder), 'the run is deleted in spite of the wrong name');
  // The refusal is the response to the form.
  page.faults.splice(0);
  await page.fill('input[name=name]', 'iris-random');
  await answer(page);
  equal(new URL(page.url()).pathname, '/experiments', 'page after Delete');
  check(!existsSync(folder), 'the record remains');
  for (const one of [page, list]) {
    const isGone = async () => !(await one.innerText('main')).includes('iris-random');
    await until(isGone, 'the run leaves the list');
    noFaults(one);
  }
});
