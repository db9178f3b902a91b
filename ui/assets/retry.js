// Loads that fail are repeated, because the server does not report the same change again.

import { isTransient } from './data.js';

// Times in ms until a load is repeated: the second is the limit of doubling the first.
const FIRST = 3000;
const LONGEST = 60000;
// Time in ms after which a load counts as ended: its connection may have broken silently.
const OPEN_MAX = 60000;

let isConnected = true;

/** Says whether the server answers. Loads start again when it does, so no timer starts them. */
export function setConnected(is) {
  isConnected = is;
}

/** One load that is repeated until it succeeds. It never waits for more than one repetition. */
export class Retry {
  #load;
  #failuresMax;
  #failures = 0;
  #timer = 0;
  #version = 0;
  #open = 0;
  #since = 0;

  /** `load(isRepeated)` returns the error or null. After `failuresMax` in a row, it rests. */
  constructor(load, failuresMax = Infinity) {
    this.#load = load;
    this.#failuresMax = failuresMax;
  }

  /** Whether a load that began less than a minute ago has not ended. */
  get isOpen() {
    return this.#open > 0 && Date.now() - this.#since < OPEN_MAX;
  }

  /** Loads now. The outcome of an earlier request that is still open no longer counts. */
  async run(isRepeated = false) {
    this.stop();
    const version = this.#version;
    this.#open += 1;
    this.#since = Date.now();
    let error = null;
    try {
      error = await this.#load(isRepeated);
    } finally {
      this.#open -= 1;
    }
    if (version !== this.#version) return;
    // Errors without a status are not those of a request.
    if (error?.status === undefined || !isTransient(error.status)) {
      this.#failures = 0;
      return;
    }
    this.#failures += 1;
    if (this.#failures > this.#failuresMax) return;
    this.#timer = setTimeout(() => {
      if (isConnected && !document.hidden) this.run(true);
    }, Math.min(LONGEST, FIRST * 2 ** (this.#failures - 1)));
  }

  /** Ends the wait for a repetition. */
  stop() {
    clearTimeout(this.#timer);
    this.#version += 1;
  }
}
