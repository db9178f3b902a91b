// Access: token, host name, cookie, downloads of checkpoints, and paths that leave the record.

import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { request } from 'node:http';
import { join } from 'node:path';
import { address, base, browse, check, equal, input, load, noFaults } from './page.mjs';

const url = new URL(input.url);

/** Sends a request whose path and headers stay as they are. Returns status, headers and body. */
function get(path, headers = {}) {
  return new Promise((resolve, reject) => {
    request({ host: '127.0.0.1', port: url.port, path, headers }, (response) => {
      const parts = [];
      response.on('data', (part) => parts.push(part));
      response.on('end', () => resolve({ status: response.statusCode,
        headers: response.headers, body: Buffer.concat(parts) }));
    }).on('error', reject).end();
  });
}

async function tokens() {
  const views = ['/', '/experiments', base(), `${base()}/data.json`, '/assets/app.js', '/live'];
  for (const path of views) {
    const { status, headers } = await get(path);
    equal(status, 403, `status of ${path} without a token`);
    check(headers['content-security-policy'], `${path} has no content policy`);
    const wrong = await get(`${path}?token=${'0'.repeat(32)}`);
    equal(wrong.status, 403, `status of ${path} with a wrong token`);
    equal(wrong.headers['set-cookie'], undefined, 'cookie of a wrong token');
  }
  const signed = await get(url.pathname + url.search);
  equal(signed.status, 303, 'status of the printed URL');
  check(!signed.headers.location.includes('token'), 'the redirect contains the token');
  const [cookie] = signed.headers['set-cookie'];
  check(/; HttpOnly/.test(cookie) && /; SameSite=Strict/.test(cookie), `cookie ${cookie}`);
  return { cookie: cookie.split(';')[0] };
}

async function hosts({ cookie }) {
  for (const host of ['evil.example', `evil.example:${url.port}`, '127.0.0.1', '127.0.0.1:1',
    `127.0.0.1.evil.example:${url.port}`]) {
    const { status } = await get('/experiments', { host, cookie });
    equal(status, 403, `status with the host name ${host}`);
  }
  const { status } = await get('/experiments', { host: `localhost:${url.port}`, cookie });
  equal(status, 200, 'status with the host name localhost');
}

async function download({ cookie }) {
  const folder = `trials/${input.trial}/checkpoints/${input.checkpoint}`;
  const path = join(input.root, 'default', input.id, folder);
  const manifest = JSON.parse(readFileSync(join(path, 'manifest.json'), 'utf8'));
  const names = Object.keys(manifest.files);
  check(names.length > 1, `the manifest has the files ${names}`);
  for (const name of names) {
    const { status, body, headers } = await get(`${base()}/${folder}/files/${name}`, { cookie });
    equal(status, 200, `status of ${name}`);
    const hash = createHash('sha256').update(body).digest('hex');
    equal(hash, manifest.files[name].sha256, `SHA-256 of ${name}`);
    check(headers['content-disposition'].startsWith('attachment'), `${name} is no attachment`);
  }
  return `${base()}/${folder}`;
}

/** Files outside of the manifest are refused, whatever the encoding of the path. */
async function traversal({ cookie }, checkpoint) {
  const outside = ['manifest.json', '../manifest.json', '../../record.json', 'x/../state.json',
    '../../../../../../../etc/passwd', '/etc/passwd', './state.json'];
  const encodings = [(path) => path, (path) => path.replaceAll('/', '%2f'),
    (path) => path.replaceAll('.', '%2e').replaceAll('/', '%2F'),
    (path) => path.replaceAll('.', '%252e'), (path) => path.replaceAll('/', '\\')];
  const bases = [`${checkpoint}/files/`, '/assets/', `${checkpoint}/files/%00`,
    `${base()}/trials/0/checkpoints/`, `/experiments/`];
  for (const start of bases) {
    for (const encode of encodings) {
      for (const path of outside) {
        const { status, body } = await get(start + encode(path), { cookie });
        check(status >= 400 && status < 500, `status ${status} of ${start}${encode(path)}`);
        check(!/root:|sha256/.test(body), `${start}${encode(path)} contains a file`);
      }
    }
  }
}

const cookie = await tokens();
await hosts(cookie);
await traversal(cookie, await download(cookie));
await browse(async (open, context) => {
  const page = await open('/experiments');
  const cookies = await context.cookies();
  check(cookies.length === 1 && cookies[0].httpOnly, `cookies: ${JSON.stringify(cookies)}`);
  equal(await page.evaluate(() => document.cookie), '', 'cookie that scripts can read');
  await load(page, input.url);
  check(!page.url().includes('token'), 'the address bar keeps the token');
  check(page.url().startsWith(address('/experiments')), `the URL leads to ${page.url()}`);
  noFaults(page);
});
