// Without JavaScript: tables, tabs, the filter, sort links and pager links work.

import { base, browse, check, equal, input, noFaults, record, address } from './page.mjs';

const trialsOf = (page) => page.$$eval('#trials-rows tr', (rows) =>
  rows.map((row) => +row.dataset.trial));

const values = (page) => page.$$eval('#trials-rows .value-cell', (cells) =>
  cells.map((cell) => Number(cell.textContent)));

async function tabs(page) {
  const names = ['Trials', 'Rungs', 'Hyperparameters', 'Checkpoints', 'Configuration', 'Events',
    'Logs', 'Overview'];
  for (const name of names) {
    // Until the style sheet is loaded, the controls are visible.
    const link = page.locator('nav.tabs a', { hasText: name });
    await Promise.all([page.waitForNavigation({ waitUntil: 'load' }), link.click()]);
    const current = await page.innerText('nav.tabs a[aria-current=page]');
    check(current.startsWith(name), `the tab ${name} opens ${current}`);
    const scripts = await page.locator('.js-only:visible').count();
    equal(scripts, 0, `controls in the tab ${name} that need scripts`);
  }
}

async function filter(page) {
  await page.fill('[data-filter]', 'validation_loss < 0.2');
  await page.press('[data-filter]', 'Enter');
  await page.waitForURL(/filter=/);
  const wanted = [...record().values()].filter(({ status }) => Number(status.bestMetric) < 0.2)
    .map(({ spec }) => spec.index).sort((a, b) => a - b);
  equal((await trialsOf(page)).sort((a, b) => a - b), wanted, 'filtered trials');
  await page.fill('[data-filter]', 'validation_loss <');
  await page.press('[data-filter]', 'Enter');
  await page.waitForSelector('#filter-error');
}

async function sort(page) {
  await page.goto(address(`${base()}/trials`));
  const header = () => page.locator('#trials-table th a', { hasText: 'validation_loss' });
  for (const order of ['ascending', 'descending']) {
    await header().click();
    await page.waitForURL(/sort=/);
    const shown = await page.locator('#trials-table th[aria-sort]:not([aria-sort=none])')
      .getAttribute('aria-sort');
    const list = await values(page);
    const sorted = [...list].sort((a, b) => (shown === 'ascending' ? a - b : b - a));
    equal(list, sorted, `values in order ${shown} after the ${order} click`);
  }
}

/** Follows "Load more rows" from the first to the last page of a long table. */
async function pager(page) {
  await page.goto(address(`${base(input.long)}/trials`));
  const first = await trialsOf(page);
  const more = page.locator('#trials-more a');
  equal(await more.count(), 1, 'links to more rows');
  await more.click();
  await page.waitForURL(/\?/);
  const second = await trialsOf(page);
  const all = new Set([...first, ...second]);
  equal(all.size, record(input.long).size, 'rows of both pages');
  equal(await more.count(), 0, 'links to more rows on the last page');
}

await browse(async (open) => {
  const page = await open();
  await page.goto(address('/experiments'));
  await page.locator('#experiments-rows a.name', { hasText: 'iris-asha' }).first().click();
  check((await trialsOf(page)).length > 0, 'the overview has no table of trials');
  await tabs(page);
  await page.locator('nav.tabs a', { hasText: 'Trials' }).click();
  equal((await trialsOf(page)).length, record().size, 'rows of the tab Trials');
  await filter(page);
  await sort(page);
  await page.locator(`#trial-${input.trial} a`).first().click();
  await page.waitForSelector('#attempts tbody tr');
  await page.locator('a[rel=next], a[rel=prev]').first().click();
  await page.waitForURL(/\/trials\/\d+/);
  await pager(page);
  await page.goto(address('/experiments'));
  for (const box of await page.locator('#experiments-rows input').all()) await box.check();
  await page.locator('button', { hasText: 'Compare selected' }).click();
  await page.waitForURL(/\/compare\?e=.*&e=/);
  check(await page.locator('#differences tbody tr').count() > 1, 'compare has no rows');
  noFaults(page);
}, { javaScriptEnabled: false });
