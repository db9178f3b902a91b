// A load that fails after a change is repeated: the server does not report the change again.

import { base, browse, drawn, noFaults, until } from './page.mjs';
import { change, relabel } from './change.mjs';

/** Lets the next request of a path fail, and returns a promise of the failure. */
async function failNext(page, path, answer) {
  let failed;
  const promise = new Promise((resolve) => { failed = resolve; });
  await page.route((url) => url.pathname === path, async (route) => {
    await answer(route);
    failed();
  }, { times: 1 });
  return () => promise;
}

const disconnect = (route) => route.abort('connectionreset');

const unavailable = (route) => route.fulfill({ status: 503, body: 'later' });

/** A row shows a change, although the first request for it failed. */
async function list(page) {
  for (const [label, answer] of [['lost', disconnect], ['unavailable', unavailable]]) {
    const failure = await failNext(page, '/experiments', answer);
    relabel(label);
    await failure();
    await page.locator('#experiments-rows tr', { hasText: label }).waitFor();
    // The failed request is a fault of the page.
    page.faults.splice(0);
  }
}

/** Plots load their data again, although the first request failed. */
async function plots(page) {
  await drawn(page, 'curves');
  const loads = () => page.evaluate(async () => (await import('/assets/data.js')).store.version);
  await until(async () => await loads() > 0, 'the plots have data');
  const before = await loads();
  const failure = await failNext(page, `${base()}/data.json`, disconnect);
  relabel('plots');
  await failure();
  await until(async () => await loads() > before, 'the plots load their data again');

  const next = await failNext(page, `${base()}/curves.json`, disconnect);
  relabel('curves');
  await next();
  await page.locator('#curves .plot-error').waitFor();
  await page.locator('#curves .plot-error').waitFor({ state: 'detached' });
  page.faults.splice(0);
}

await browse(async (open) => {
  await list(await open('/experiments'));
  // An experiment that waits for its runner: nothing else changes the record.
  change(({ status }) => { status.phase = 'Pending'; });
  const page = await open();
  await until(async () => {
    await page.goto(new URL(base(), page.url()).href);
    return page.locator('[data-live-state=live]').count();
  }, 'the page is live');
  await plots(page);
  noFaults(page);
});
