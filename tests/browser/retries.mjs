// A load that fails after a change is repeated: the server does not report the change again.

import { base, browse, check, drawn, equal, noFaults, until, visit } from './page.mjs';
import { change, relabel } from './change.mjs';

// What the page of an experiment loads after a change.
const paths = () => [base(), `${base()}/data.json`, `${base()}/curves.json`];
// Time in ms in which a page repeats a load several times, unless it waits ever longer.
const LONG = 10_000;
// Time in ms after which a page has made all loads of a change, but repeats none yet.
const SETTLED = 1500;
// Number of changes that a page cannot load.
const CHANGES = 3;

const wait = (time) => new Promise((resolve) => { setTimeout(resolve, time); });

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

/** Answers all loads of a page with an error. Returns their numbers by path, and how to stop. */
async function failAll(page, status) {
  const counts = Object.fromEntries(paths().map((path) => [path, 0]));
  const isLoad = (url) => url.pathname in counts;
  await page.route(isLoad, (route) => {
    counts[new URL(route.request().url()).pathname] += 1;
    return route.fulfill({ status, body: 'later' });
  });
  return { counts, stop: () => page.unroute(isLoad) };
}

/** Changes the record, and waits until the page has tried to load it. */
async function loads(counts, label) {
  const before = { ...counts };
  relabel(label);
  await until(() => paths().every((path) => counts[path] > before[path]), `loads of ${label}`);
}

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

const version = (page) => page.evaluate(async () =>
  (await import('/assets/data.js')).store.version);

/** Plots load their data again, although the first request failed. */
async function plots(page) {
  await drawn(page, 'curves');
  await until(async () => await version(page) > 0, 'the plots have data');
  const before = await version(page);
  const failure = await failNext(page, `${base()}/data.json`, disconnect);
  relabel('plots');
  await failure();
  await until(async () => await version(page) > before, 'the plots load their data again');

  const next = await failNext(page, `${base()}/curves.json`, disconnect);
  const loaded = page.waitForResponse((one) => one.url().includes('/curves.json') && one.ok());
  relabel('curves');
  await next();
  await loaded;
  await page.locator('#curves .plot-error').waitFor({ state: 'detached' });
  page.faults.splice(0);
}

/** What is gone, or not allowed, is not asked for again. */
async function onlyOnce(page) {
  const { counts, stop } = await failAll(page, 404);
  await loads(counts, 'gone');
  await wait(SETTLED);
  const before = { ...counts };
  await wait(LONG / 2);
  equal(counts, before, 'loads after an error that stays');
  await stop();
  page.faults.splice(0);
}

/** While loads fail, each change adds one load, and the repetitions become rare. */
async function rarely(page) {
  const { counts, stop } = await failAll(page, 503);
  await loads(counts, 'change 0');
  const error = page.locator('#curves .plot-error');
  await error.evaluate((element) => { element.dataset.mark = 'same'; });
  for (let i = 1; i < CHANGES; i += 1) await loads(counts, `change ${i}`);
  const before = { ...counts };
  await wait(LONG);
  for (const path of paths()) {
    const loaded = counts[path] - before[path];
    // The second may be that of a change, if a repetition came before it.
    check(loaded <= 2, `${loaded} loads of ${path} in ${LONG} ms`);
  }
  // Screen readers read the same error once.
  equal(await error.getAttribute('data-mark'), 'same', 'mark of the error');
  await stop();
  relabel('works');
  await error.waitFor({ state: 'detached' });
  page.faults.splice(0);
}

await browse(async (open) => {
  await list(await open('/experiments'));
  // An experiment that waits for its runner: nothing else changes the record.
  change(({ status }) => { status.phase = 'Pending'; });
  const page = await open();
  await until(async () => {
    await visit(page, base());
    return page.locator('[data-live-state=live]').count();
  }, 'the page is live');
  await plots(page);
  await onlyOnce(page);
  await rarely(page);
  noFaults(page);
});
