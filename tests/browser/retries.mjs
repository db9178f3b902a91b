// A load that fails after a change is repeated: the server does not report the change again.

import { base, browse, drawn, equal, input, namespace, noFaults, until, visit }
  from './page.mjs';
import { change, relabel } from './change.mjs';

// What the page of an experiment loads after a change.
const paths = () => [base(), `${base()}/data.json`, `${base()}/curves.json`];
// Number of changes that a page cannot load.
const CHANGES = 3;
// Statuses of loads that fail, and when each load starts in 160 s, in ms. A failure without
// a status is not one of a request.
const TIMES = [
  [503, Infinity, [0, 3000, 9000, 21_000, 45_000, 93_000, 153_000]],
  [0, Infinity, [0, 3000, 9000, 21_000, 45_000, 93_000, 153_000]],
  [503, 2, [0, 3000, 9000]],
  [404, Infinity, [0]],
  [undefined, Infinity, [0]],
];

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

/** A plot starts, although the first request for one of its scripts failed. */
async function starts(page) {
  for (const file of ['plots/curves.js', 'plots/lines.js']) {
    await page.goto('about:blank');
    const failure = await failNext(page, `/assets/${file}`, disconnect);
    await visit(page, base());
    await failure();
    await drawn(page, 'curves');
    await page.locator('#curves .plot-error').waitFor({ state: 'detached' });
    page.faults.splice(0);
  }
}

/** A table that the pointer holds shows the last change when the pointer leaves it. */
async function leaves(page) {
  await visit(page, `/compare?e=${namespace}/${input.id}&all=1`);
  await page.waitForSelector('[data-live-state=live]');
  await page.locator('#differences tbody tr').first().hover();
  await page.evaluate(() => {
    document.addEventListener('stoker:replaced', () => { document.body.dataset.replaced = ''; });
  });
  relabel('left');
  await page.waitForSelector('[data-replaced]');
  const table = await page.locator('#differences').textContent();
  equal(table.includes('left'), false, 'the table under the pointer was replaced');
  await page.mouse.move(2, 2);
  await page.locator('#differences', { hasText: 'left' }).waitFor();
}

/** Loads that fail are repeated ever more rarely, and others are not. The test moves the clock. */
async function times(page) {
  await page.clock.install();
  // The page of an experiment that has ended loads nothing by itself.
  change(({ status }) => { status.phase = 'Completed'; });
  await until(async () => {
    await visit(page, base());
    return !await page.locator('body[data-live]').count();
  }, 'the page no longer follows the experiment');
  await page.clock.pauseAt(Date.now() + 60_000);
  for (const [status, failuresMax, expected] of TIMES) {
    const started = await page.evaluateHandle(async ([code, limit]) => {
      const { Retry } = await import('/assets/retry.js');
      const start = Date.now();
      const loads = [];
      new Retry(() => {
        loads.push(Date.now() - start);
        return { status: code };
      }, limit).run();
      return loads;
    }, [status, failuresMax]);
    await page.clock.runFor(160_000);
    equal(await started.jsonValue(), expected, `loads of status ${status}`);
  }
}

/** A load is open until it ends, also if another one started meanwhile. */
async function openLoads(page) {
  const seen = await page.evaluate(async () => {
    const { Retry } = await import('/assets/retry.js');
    const ends = [];
    const retry = new Retry(() => new Promise((resolve) => { ends.push(resolve); }));
    const states = [retry.isOpen];
    const runs = [retry.run(), retry.run()];
    for (const [at, end] of ends.entries()) {
      states.push(retry.isOpen);
      end(null);
      await runs[at];
    }
    return [...states, retry.isOpen];
  });
  equal(seen, [false, true, true, false], 'whether a load is open');
}

/** The error of a load stays the same element until a load succeeds. */
async function error(page) {
  const { counts, stop } = await failAll(page, 503);
  await loads(counts, 'change 0');
  const shown = page.locator('#curves .plot-error');
  // Screen readers would read a new element again, and its button would lose the focus.
  await shown.evaluate((element) => { element.dataset.mark = 'same'; });
  for (let i = 1; i < CHANGES; i += 1) await loads(counts, `change ${i}`);
  const { width, height } = page.viewportSize();
  const plot = () => page.locator('#curves canvas').first().evaluate((one) => one.clientWidth);
  const before = await plot();
  await page.setViewportSize({ width: width - 100, height });
  await until(async () => await plot() !== before, 'the plot has its new size');
  equal(await shown.getAttribute('data-mark'), 'same', 'mark of the error');
  await stop();
  relabel('works');
  await shown.waitFor({ state: 'detached' });
  page.faults.splice(0);
}

/** The page reports that updates have ended, although it connects again every 3 s. */
async function reports(page) {
  const isLive = ({ pathname }) => pathname === '/live';
  const isPage = ({ pathname }) => pathname === base();
  const banner = page.locator('[data-live-banner]');
  await page.route(isLive, unavailable);
  await visit(page, base());
  await banner.filter({ hasText: 'Live updates stopped' }).waitFor();
  equal(await page.innerText('[data-live-word]'), 'Reconnecting', 'word beside the dot');
  // The end of a session is known at once, and the banner leads to the sign-in.
  await visit(page, base());
  await page.route(isPage, (route) => route.fulfill({ status: 401, body: 'sign in' }));
  await banner.getByRole('link', { name: 'Sign in again' }).waitFor();
  await page.unroute(isPage);
  await page.unroute(isLive);
  await page.waitForSelector('[data-live-state=live]');
  await banner.waitFor({ state: 'hidden' });
  page.faults.splice(0);
}

/**
 * The page of a deleted experiment keeps its last state, and follows it no longer. If the
 * experiment exists again when its tab is shown, the page is live again.
 */
async function deleted(page) {
  const { stop } = await failAll(page, 404);
  relabel('deleted');
  const banner = page.locator('[data-live-banner]');
  await banner.filter({ hasText: 'This experiment was deleted.' }).waitFor();
  equal(await page.locator('[data-live-state]').isVisible(), false, 'whether the page is live');
  equal(await banner.getByRole('button').count(), 0, 'buttons of the banner');
  const showTab = () => page.evaluate(() => {
    document.dispatchEvent(new Event('visibilitychange'));
  });
  const missing = page.waitForResponse((one) => new URL(one.url()).pathname === base());
  await showTab();
  equal((await missing).status(), 404, 'status of the page of a deleted experiment');
  equal(await banner.isVisible(), true, 'whether the banner of a missing experiment stays');
  await stop();
  await showTab();
  await page.waitForSelector('[data-live-state=live]');
  await banner.waitFor({ state: 'hidden' });
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
  await openLoads(page);
  await starts(page);
  await plots(page);
  await error(page);
  await reports(page);
  await deleted(page);
  await leaves(page);
  noFaults(page);
  // The clock holds for all pages, so this comes last.
  await times(await open());
});
