// The page of a cluster: a viewer signs in, sees a search finish live, and opens every view of it
// and of a search that still runs.
// `tests/tests/two_nodes/page.rs` starts the search when this script asks for it.

import { WIDE, ask, base, browse, check, equal, input, navigate, noFaults, picture, until, visit }
  from './page.mjs';
import { faultsOf, noneOf } from './faults.mjs';
import { look, lookAtRunning } from './look.mjs';
import { views } from './list.mjs';

/** Enters a token, and waits for the page behind the form. */
async function signIn(page, token) {
  await page.waitForSelector('form[action="/sign-in"]');
  await page.fill('input[name=token]', token);
  await navigate(page, () => page.keyboard.press('Enter'));
}

/** Adds the namespace: the viewer may not list all namespaces, and the page offers none. */
async function addNamespace(page) {
  await page.waitForSelector('h1:text-is("Namespaces")');
  await page.fill('main form input:not([type=hidden])', input.namespace);
  await navigate(page, () => page.keyboard.press('Enter'));
}

/** Waits for a row of the list, and updates the table if it offers that. */
async function row(list, selector) {
  await until(async () => {
    if (await list.locator(selector).count()) return true;
    const update = list.locator('[data-live-update]:visible');
    if (await update.count()) await update.click();
    return false;
  }, `the list has ${selector}`);
}

/** Viewers without a known token see only the form. */
async function refuses(page) {
  await signIn(page, 'unknown');
  await page.waitForSelector('[role=alert]');
  equal(await page.locator('#experiments-rows').count(), 0, 'tables without a session');
  page.faults.splice(0);
}

/** Trials, results and the end of a search appear without a reload. */
async function follows(open) {
  const list = await open('/experiments');
  await list.evaluate(() => { window.loadedOnce = true; });
  await ask('start');
  const one = `#experiments-rows tr:has(a[href^="${base()}"])`;
  await row(list, one);
  const page = await open(base());
  await page.evaluate(() => { window.loadedOnce = true; });
  await ask('end');
  await page.waitForSelector('#phase[data-phase=Completed]');
  await row(list, `${one}:has-text("Completed")`);
  for (const tab of [list, page]) {
    check(await tab.evaluate(() => window.loadedOnce), `${tab.url()} was loaded again`);
    noFaults(tab);
  }
}

await browse(async (open) => {
  const page = await open();
  await refuses(page);
  await signIn(page, input.token);
  await addNamespace(page);
  await follows(open);
  const { id } = input;
  Object.assign(input, { id: input.other }, JSON.parse(await ask('running')));
  await lookAtRunning(page);
  Object.assign(input, { id }, JSON.parse(await ask('details')));
  const faults = [];
  for (const view of views()) {
    await visit(page, view.path);
    await look(page, view, WIDE, 'light');
    if (view.name === 'overview') await picture(page, 'cluster-overview');
    noFaults(page);
    faults.push(...await faultsOf(page, view.name));
  }
  noneOf(faults);
});
