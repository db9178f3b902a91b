// A running search: results appear without a reload, zoom and selection stay, and the page
// reconnects. `tests/tests/page.rs` stops and starts the server when this script asks for it.

import { ask, base, browse, check, drawn, equal, noFaults, query, record, until } from './page.mjs';

/** Returns the trials of the record that have ended, with their result. */
function ended() {
  const all = [...record()].filter(([, { status }]) => status.phase === 'Completed'
    && status.bestMetric);
  return new Map(all.map(([index, { status }]) => [index, status.bestMetric]));
}

/** Waits for the result of a trial that starts after this call. */
async function next() {
  const before = record();
  return until(() => [...ended()].find(([index]) => !before.has(index)), 'another trial ends');
}

/** Waits until a row of the table shows a result of the record. */
async function shows(page, [trial, metric]) {
  const text = Number(metric).toFixed(4);
  await page.waitForSelector(`#trial-${trial} .value-cell:text-is("${text}")`);
}

async function zoom(page) {
  await drawn(page, 'curves');
  const { x, y, width, height } = await page.locator('#curves .u-over').boundingBox();
  await page.mouse.move(x + 0.2 * width, y + 0.5 * height);
  await page.mouse.down();
  await page.mouse.move(x + 0.4 * width, y + 0.5 * height, { steps: 4 });
  await page.mouse.move(x + 0.8 * width, y + 0.52 * height, { steps: 4 });
  const loaded = page.waitForResponse((one) => /curves\.json\?.*&from=/.test(one.url()));
  await page.mouse.up();
  await page.mouse.move(2, 2);
  equal((await loaded).status(), 200, 'status of the points of a zoom');
  return until(() => query(page, 'zoom'), 'the URL holds the zoom');
}

/** A new result changes neither zoom nor selection, and the table waits for the user. */
async function keeps(page) {
  const [first] = [...ended().keys()];
  await page.locator(`input[data-select="${first}"]`).click();
  const range = await zoom(page);
  await page.evaluate(() => { document.querySelector('#curves .uplot').dataset.mark = 'same'; });
  const found = await next();
  await page.waitForSelector('[data-live-pending]:visible');
  await page.waitForFunction((trial) => fetch(`${document.body.dataset.base}/data.json`)
    .then((response) => response.json()).then(({ trials }) => trials.index.includes(trial)),
  found[0]);
  equal(query(page, 'zoom'), range, 'zoom after a new result');
  equal(query(page, 'sel'), String(first), 'selection after a new result');
  equal(await page.locator('#curves .uplot[data-mark=same]').count(), 1, 'plots that stayed');
  equal(await page.locator('#trials-table tr.is-selected').count(), 1, 'selected rows');
  // The next change may show the line again at once, so click and look in one step.
  check(await page.evaluate(() => {
    document.querySelector('[data-live-update]').click();
    return document.querySelector('[data-live-pending]').hidden;
  }), 'the line of changes stays after an update of the table');
  equal(query(page, 'sel'), String(first), 'selection after an update of the table');
}

/** Links and buttons below the plots keep the focus while results appear. */
async function keepsFocus(page) {
  const version = () => page.evaluate(async () => (await import('/assets/data.js')).store.version);
  for (const place of ['#curves .legend a', '#parallel .card-note button']) {
    await page.locator(place).first().focus();
    const before = await version();
    await until(async () => await version() > before + 1, 'the page loads its data twice');
    check(await page.locator(place).first().evaluate((one) => one === document.activeElement),
      `${place} has lost the focus`);
  }
}

async function reconnects(page, open) {
  await ask('stop');
  await page.waitForSelector('[data-live-banner]:visible');
  check((await page.innerText('[data-live-banner]')).includes('Live updates stopped'),
    'the banner does not say that live updates stopped');
  equal(await page.innerText('[data-live-word]'), 'Reconnecting', 'word beside the dot');
  // While the server is away, requests fail.
  page.faults.splice(0);
  const url = await ask('start');
  // The new server has a new token: its URL gives it to all tabs of the browser.
  await open(null, url);
  await page.waitForSelector('[data-live-state=live]');
  await page.waitForSelector('[data-live-banner]', { state: 'hidden' });
  page.faults.splice(0);
}

await browse(async (open) => {
  const table = await open(`${base()}/trials`);
  const page = await open(base());
  for (const one of [page, table]) {
    await one.evaluate(() => { window.loadedOnce = true; });
    equal(await one.innerText('[data-live-word]'), 'Live', 'word beside the dot');
  }
  await shows(table, await next());
  await keeps(page);
  await keepsFocus(page);
  noFaults(page);
  await reconnects(page, open);
  await until(() => table.locator('[data-live-state=live]').count(), 'the other tab reconnects');
  await shows(table, await next());
  for (const one of [page, table]) {
    check(await one.evaluate(() => window.loadedOnce), `${one.url()} was loaded again`);
  }
});
