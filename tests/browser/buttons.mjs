// The buttons of an experiment's page, and the record of a local run that they change.

import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';

import { base, follow, input, until } from './page.mjs';

/** Returns the directory of a local run's record. */
export const folder = (id = input.id) => join(input.root, 'local', id);

const read = (id, name) => JSON.parse(readFileSync(join(folder(id), 'record', name), 'utf8'));

export const phase = (id = input.id) => read(id, 'experiment.json').status.phase;

/** Returns the state that the page has requested. The runner reads it some time later. */
export const requested = () => read(input.id, 'request.json').state;

/** Returns the page to which the request for a state leads, if the server has handled it. */
export const landed = (state, path = base()) => () =>
  existsSync(join(folder(), 'record/request.json')) && requested() === state && path;

/** Returns the list of experiments if the record of a run is deleted. */
export const deleted = () => !existsSync(folder()) && '/experiments';

/** Waits until the page has exactly these buttons. */
export async function offers(page, expected, between = async () => {}) {
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

export const button = (page, title) =>
  page.locator('#actions button, #actions a', { hasText: new RegExp(`^${title}…?$`) });

/** Opens the question before an action, and returns its text. */
export async function question(page, title) {
  await follow(page, button(page, title));
  return page.innerText('.effects');
}

/** Answers the question. `landed` is the parameter of `navigate`. */
export const answer = (page, landed) =>
  follow(page, page.locator('form.confirm button'), landed);
