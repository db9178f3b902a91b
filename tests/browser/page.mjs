// Browser, checks and pictures for all scripts. `tests/tests/page.rs` starts each script with its
// input as JSON: {url, tools, chromium, root, id, ...}.

import { createRequire } from 'node:module';
import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';

export const input = JSON.parse(process.argv[2]);
const require = createRequire(join(input.tools, 'node_modules/'));
const { chromium } = require('playwright-core');

export const WIDE = { width: 1440, height: 1100 };
export const NARROW = { width: 390, height: 844 };
// Limit of one wait. It is far longer than any event takes.
const PATIENCE = 60_000;
// Limit for loading a page that changes of the network interrupt. More than one in a row is rare.
const LOADS_MAX = 5;
// Start of the URL of Chromium's page for a load that failed.
const ERROR_PAGE = 'chrome-error://';

const server = new URL(input.url).origin;
export const namespace = input.namespace ?? 'default';
export const base = (id = input.id) => `/experiments/${namespace}/${id}`;
export const address = (path) => server + path;

/** Fails with a message that names what was expected. */
export function check(isRight, message) {
  if (!isRight) throw new Error(message);
}

/** Compares two values by their JSON. */
export function equal(actual, expected, what) {
  const [one, other] = [JSON.stringify(actual), JSON.stringify(expected)];
  check(one === other, `${what}: got ${one}, expected ${other}`);
}

/** Collects errors of a page: console, scripts, content policy, dialogs and failed requests. */
function watch(page) {
  const faults = [];
  const add = (text) => faults.push(`${page.url()}: ${text}`);
  page.networkChanges = 0;
  page.errorPages = 0;
  page.on('framenavigated', (frame) => {
    if (frame === page.mainFrame() && frame.url().startsWith(ERROR_PAGE)) page.errorPages += 1;
  });
  page.on('console', (message) => {
    // Chromium ends its requests when an interface of this machine comes or goes, such as one of
    // the test cluster. `visit` loads the page again, and open pages reconnect and load their data.
    if (message.text().includes('ERR_NETWORK_CHANGED')) {
      page.networkChanges += 1;
      return;
    }
    if (['error', 'warning'].includes(message.type())) add(`console: ${message.text()}`);
  });
  page.on('pageerror', (error) => add(`script: ${error}`));
  page.on('dialog', (dialog) => {
    add(`dialog: ${dialog.message()}`);
    dialog.dismiss().catch(() => {});
  });
  page.on('response', (response) => {
    if (response.status() >= 400) add(`${response.status()} of ${response.url()}`);
  });
  page.faults = faults;
  return page;
}

/** Fails if the page had errors since the last call. */
export function noFaults(page) {
  const faults = page.faults.splice(0);
  check(faults.length === 0, `the page has ${faults.length} errors:\n  ${faults.join('\n  ')}`);
}

/** Runs `test(open, context)` in a browser. `open(path)` returns a page that is signed in. */
export async function browse(test, options = {}) {
  const isRoot = process.getuid?.() === 0;
  const browser = await chromium.launch({ executablePath: input.chromium,
    args: ['--disable-gpu', ...(isRoot ? ['--no-sandbox'] : [])] });
  let status = 0;
  const pages = [];
  try {
    const context = await browser.newContext({ viewport: WIDE, colorScheme: 'light',
      reducedMotion: 'reduce', timezoneId: 'UTC', locale: 'en-US', ...options });
    context.setDefaultTimeout(PATIENCE);
    await fromFolder(context);
    const open = async (path, url = input.url) => {
      const page = watch(await context.newPage());
      pages.push(page);
      // The token of the URL moves into a cookie.
      await load(page, url);
      if (path) await visit(page, path);
      return page;
    };
    await test(open, context);
  } catch (error) {
    status = 1;
    const faults = pages.flatMap((page) => page.faults).slice(0, 20);
    console.error(`${error.stack || error}\n${faults.join('\n')}`);
    await savePages(pages);
  }
  await browser.close();
  // An open input would keep the script alive.
  process.stdin.destroy();
  process.exitCode = status;
}

/** With STOKER_ASSETS=ui/assets, files of that folder replace those built into `stoker`. */
async function fromFolder(context) {
  const folder = process.env.STOKER_ASSETS;
  if (!folder) return;
  await context.route('**/assets/**', (route) => {
    const path = join(folder, new URL(route.request().url()).pathname.replace('/assets/', ''));
    const answered = existsSync(path) ? route.fulfill({ path }) : route.continue();
    // A page that was left takes no answer.
    return answered.catch(() => {});
  });
}

/** Stores what the pages show after a failure, if STOKER_PICTURES is set. */
async function savePages(pages) {
  if (!process.env.STOKER_PICTURES) return;
  for (const [i, page] of pages.entries()) {
    const path = join(process.env.STOKER_PICTURES, `failed-${i}.png`);
    await page.screenshot({ path }).catch(() => {});
  }
}

/** Sends a command to the test, and returns its answer. */
export async function ask(command) {
  console.log(command);
  const { value, done } = await answers().next();
  check(!done, `no answer to ${command}`);
  return value;
}

let lines;

function answers() {
  lines ??= createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  return lines;
}

/** Opens a path and waits until the scripts of the page have started. */
export async function visit(page, path) {
  const response = await load(page, address(path));
  check(response.status() === 200, `${path} has status ${response.status()}`);
  await scripts(page);
}

/** Loads a page with `first`, and then with `again` while interfaces of this machine change. */
async function repeat(page, first, again) {
  for (let loads = 0; loads < LOADS_MAX; loads += 1) {
    const { networkChanges: before, errorPages } = page;
    const response = await (loads === 0 ? first() : again()).catch(async (error) => {
      if (!error.message.includes('ERR_NETWORK_CHANGED')) throw error;
      page.networkChanges += 1;
      // The page of the error would interrupt the next load.
      await until(() => page.errorPages > errorPages, 'the browser shows its error');
    });
    if (page.networkChanges === before) return response;
  }
  throw new Error(`the network changed during ${LOADS_MAX} loads of ${page.url()}`);
}

/** Loads a URL. Unlike `visit`, it does not wait for scripts. */
export const load = (page, url) => repeat(page, () => page.goto(url), () => page.goto(url));

export const reload = (page) => repeat(page, () => page.reload(), () => page.reload());

/**
 * Runs `act`, and waits until the page that it opens is loaded. If the network changes meanwhile,
 * loads that page again, which also sends a form again. The server may have handled the form
 * before its response was lost: then `landed()` returns the path to which the form leads.
 */
export function navigate(page, act, landed = () => null) {
  const first = () => Promise.all([page.waitForNavigation({ waitUntil: 'load' }), act()]);
  const again = async () => {
    const path = page.url().startsWith(ERROR_PAGE) && await landed();
    return path ? page.goto(address(path)) : page.reload();
  };
  return repeat(page, first, again);
}

/** Clicks on a link or button, and waits like `navigate`. */
export const follow = (page, locator, landed) => navigate(page, () => locator.click(), landed);

export const scripts = (page) =>
  page.waitForSelector('html[data-scripts=on]', { state: 'attached' });

/** Waits until a plot is drawn. */
export async function drawn(page, name, nth = 0) {
  const plot = page.locator(`[data-plot="${name}"]`).nth(nth);
  await plot.scrollIntoViewIfNeeded();
  const element = await plot.elementHandle();
  await page.waitForFunction(isDrawn, element, { polling: 100 })
    .catch(() => { throw new Error(`the plot ${name} of ${page.url()} is blank`); });
}

/** Runs in the browser: returns whether a plot has more than a ground, axes and text. */
function isDrawn(plot) {
  const shapes = plot.querySelectorAll('svg path, svg circle, svg polyline, svg rect').length;
  if (shapes > 10) return true;
  // Reading a canvas of the page would make it slower, so read a copy.
  const [width, height] = [400, 200];
  const copy = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
  copy.imageSmoothingEnabled = false;
  let colored = 0;
  for (const canvas of plot.querySelectorAll('canvas')) {
    if (!canvas.width || !canvas.height) continue;
    copy.clearRect(0, 0, width, height);
    copy.drawImage(canvas, 0, 0, width, height);
    const { data } = copy.getImageData(0, 0, width, height);
    for (let i = 0; i < data.length; i += 4) {
      const [r, g, b] = [data[i], data[i + 1], data[i + 2]];
      // Grounds, axes and text are gray; lines and bars are not.
      if (data[i + 3] > 40 && Math.max(r, g, b) - Math.min(r, g, b) > 28) colored += 1;
    }
  }
  return colored > 8;
}

/** Fails if the page scrolls sideways. After a resize, plots need a moment. */
export async function fits(page, what) {
  const isFit = () => document.documentElement.scrollWidth <= document.documentElement.clientWidth;
  await page.waitForFunction(isFit, null, { polling: 100 }).catch(async () => {
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    throw new Error(`${what} is ${width} px wide, and scrolls sideways`);
  });
}

/** Stores a picture of the viewport if STOKER_PICTURES is set. */
export async function picture(page, name) {
  if (!process.env.STOKER_PICTURES) return;
  await page.evaluate(() => document.fonts.ready.then(() => scrollTo(0, 0)));
  await page.screenshot({ path: join(process.env.STOKER_PICTURES, `page-${name}.png`) });
}

/** Returns the trials of a record, by index. */
export function record(id = input.id) {
  const folder = join(input.root, 'local', id, 'record/trials');
  const trials = readdirSync(folder).filter((name) => /^\d+\.json$/.test(name))
    .map((name) => JSON.parse(readFileSync(join(folder, name), 'utf8')));
  return new Map(trials.map((trial) => [trial.spec.index, trial]));
}

/** Returns the trials of the record that the brush of a URL contains. An empty bound is open. */
export function inside(text) {
  const [, name, low, high] = (text || '').match(/^(\w+):(.*?)\.\.(.*)$/) || [];
  const [min, max] = [low ? +low : -Infinity, high ? +high : Infinity];
  check(name && min < max, `the brush in the URL is ${text}`);
  return [...record()].filter(([, { spec }]) => spec.hyperparameters[name] >= min
    && spec.hyperparameters[name] <= max).map(([index]) => index).sort((a, b) => a - b);
}

/** Returns the values of one query parameter, or null. */
export const query = (page, name) => new URL(page.url()).searchParams.get(name);

/** Waits until a condition in node holds, and returns its value. */
export async function until(condition, what) {
  const end = Date.now() + PATIENCE;
  for (;;) {
    const value = await condition();
    if (value) return value;
    check(Date.now() < end, `waited in vain: ${what}`);
    await new Promise((resolve) => { setTimeout(resolve, 50); });
  }
}
