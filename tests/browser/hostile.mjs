// Names, values, metrics and log lines of a hostile program are text, and nothing else.

import { NARROW, WIDE, base, browse, check, drawn, equal, fits, input, noFaults, visit }
  from './page.mjs';

const at = `${base()}/trials/0`;
const VIEWS = ['/experiments', base(), `${base()}/trials`, `${base()}/hyperparameters`,
  `${base()}/configuration`, `${base()}/logs?trial=0`, at, `${at}/metrics`, `${at}/logs`,
  `${at}/configuration`, `${at}/checkpoints`, `${base()}/compare?t=0,1`,
  `/compare?e=default/${input.id}&e=default/${input.id}`];

/** Runs in the browser: returns what a hostile text has created or hidden. */
function traces() {
  const found = [];
  if (window.hacked) found.push(`the script ${window.hacked} ran`);
  for (const tag of ['img', 'iframe', 'object', 'embed', 'base', 'style', 'b.hostile', 'a.hostile',
    'script:not([src^="/assets/"])', 'link:not([rel=stylesheet]):not([rel=icon])']) {
    for (const element of document.querySelectorAll(tag)) found.push(element.outerHTML);
  }
  for (const element of document.querySelectorAll('*')) {
    for (const { name, value } of element.attributes) {
      if (/^on/i.test(name)) found.push(`${element.tagName} ${name}=${value}`);
      const isAddress = /^(href|src|action|formaction)$/i.test(name);
      if (isAddress && /^\s*(javascript|vbscript):/i.test(value)) found.push(`${name}=${value}`);
      if (/[\u202a-\u202e\u2066-\u2069]/.test(value) && name !== 'value' && name !== 'href'
        && !name.startsWith('data-')) found.push(`bidi mark in ${name} of ${element.tagName}`);
    }
  }
  const text = document.body.textContent;
  if (/[\u202a-\u202e\u2066-\u2069]/.test(text)) found.push('bidi mark in the text');
  return found.map((one) => one.slice(0, 300));
}

async function harmless(page, what) {
  const found = await page.evaluate(traces);
  check(found.length === 0, `${what}:\n    ${found.slice(0, 8).join('\n    ')}`);
  await fits(page, what);
  noFaults(page);
}

async function plots(page) {
  const names = await page.$$eval('[data-plot]', (all) => all.map(({ dataset }) => dataset.plot));
  for (const name of new Set(names)) {
    if (name !== 'profiler') await drawn(page, name);
    const plot = page.locator(`[data-plot=${name}]`).first();
    const { x, y, width, height } = await plot.boundingBox();
    for (const part of [0.05, 0.5, 0.8]) {
      await page.mouse.move(x + part * width, y + part * Math.min(height, 400));
    }
    const table = page.locator(`.card:has([data-plot=${name}]) [data-as-table]`).first();
    if (await table.count()) await table.click();
  }
}

await browse(async (open) => {
  const page = await open();
  for (const path of VIEWS) {
    await page.setViewportSize(WIDE);
    await visit(page, path);
    if (path.includes('logs')) await page.waitForFunction(() =>
      document.querySelector('[data-logs]').textContent.includes('onerror'));
    await plots(page);
    await harmless(page, path);
    await page.setViewportSize(NARROW);
    await harmless(page, `${path}, narrow`);
  }
  await visit(page, `${base()}/trials?filter=${encodeURIComponent(input.texts[0])}&sort=%3Cimg`);
  equal(await page.inputValue('[data-filter]'), input.texts[0], 'text of the filter');
  await harmless(page, 'the filter');
  await visit(page, `${base()}/configuration`);
  const text = await page.evaluate(() => document.querySelector('main').textContent);
  for (const hostile of input.texts.slice(0, 2)) {
    check(text.includes(hostile), `the configuration does not show ${hostile}`);
  }
  check(text.includes('\\u{202e}'), 'the bidi mark is not shown as an escape');
});
