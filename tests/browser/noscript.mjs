// Without JavaScript: tables, tabs, the filter, sort links and pager links work.

import { address, base, browse, check, equal, follow, input, load, noFaults, record }
  from './page.mjs';

const trialsOf = (page) => page.$$eval('#trials-rows tr', (rows) =>
  rows.map((row) => +row.dataset.trial));

const values = (page) => page.$$eval('#trials-rows .value-cell', (cells) =>
  cells.map((cell) => Number(cell.textContent)));

async function tabs(page) {
  const names = ['Trials', 'Rungs', 'Hyperparameters', 'Checkpoints', 'Configuration', 'Events',
    'Logs', 'Overview'];
  for (const name of names) {
    // Until the style sheet is loaded, the controls are visible.
    await follow(page, page.locator('nav.tabs a', { hasText: name }));
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
  await load(page, address(`${base()}/trials`));
  const header = () => page.locator('#trials-table th a', { hasText: 'validation_loss' });
  for (const order of ['ascending', 'descending']) {
    await follow(page, header());
    const shown = await page.locator('#trials-table th[aria-sort]:not([aria-sort=none])')
      .getAttribute('aria-sort');
    const list = await values(page);
    const sorted = [...list].sort((a, b) => (shown === 'ascending' ? a - b : b - a));
    equal(list, sorted, `values in order ${shown} after the ${order} click`);
  }
}

/** Follows "Load more rows" from the first to the last page of a long table. */
async function pager(page) {
  await load(page, address(`${base(input.long)}/trials`));
  const first = await trialsOf(page);
  const more = page.locator('#trials-more a');
  equal(await more.count(), 1, 'links to more rows');
  await follow(page, more);
  const second = await trialsOf(page);
  const all = new Set([...first, ...second]);
  equal(all.size, record(input.long).size, 'rows of both pages');
  equal(await more.count(), 0, 'links to more rows on the last page');
}

await browse(async (open) => {
  const page = await open();
  await load(page, address('/experiments'));
  await follow(page,
    page.locator('#experiments-rows a.name', { hasText: 'iris-asha' }).first());
  check((await trialsOf(page)).length > 0, 'the overview has no table of trials');
  await tabs(page);
  await follow(page, page.locator('nav.tabs a', { hasText: 'Trials' }));
  equal((await trialsOf(page)).length, record().size, 'rows of the tab Trials');
  await filter(page);
  await sort(page);
  await follow(page, page.locator(`#trial-${input.trial} a`).first());
  await page.waitForSelector('#attempts tbody tr');
  const before = page.url();
  await follow(page, page.locator('a[rel=next], a[rel=prev]').first());
  check(page.url() !== before, 'the link to the next trial opens the same trial');
  check(/\/trials\/\d+/.test(page.url()), `the link to the next trial opens ${page.url()}`);
  await pager(page);
  await load(page, address('/experiments'));
  for (const box of await page.locator('#experiments-rows input').all()) await box.check();
  await follow(page, page.locator('button', { hasText: 'Compare selected' }));
  check(/\/compare\?e=.*&e=/.test(page.url()), `comparing opens ${page.url()}`);
  check(await page.locator('#differences tbody tr').count() > 1, 'compare has no rows');
  noFaults(page);
}, { javaScriptEnabled: false });
