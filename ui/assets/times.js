// Times of the server, which are in UTC, as local time. A shadow root covers the text of the
// server, which stays in the document: live updates compare it.

import { clock } from './format.js';

const two = (number) => String(number).padStart(2, '0');
const dateOf = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;

/** Returns the local time of day, with the date unless it is today. */
function local(at) {
  const [date, time] = [dateOf(at), clock(at.getTime() / 1000)];
  return date === dateOf(new Date()) ? time : `${date} ${time}`;
}

function show() {
  for (const place of document.querySelectorAll('time[datetime] > span')) {
    const at = new Date(place.parentElement.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    const text = local(at);
    const root = place.shadowRoot || place.attachShadow({ mode: 'open' });
    if (root.textContent !== text) root.textContent = text;
  }
}

export function startTimes() {
  show();
  document.addEventListener('stoker:replaced', show);
  // The day may have changed.
  document.addEventListener('visibilitychange', show);
}
