//! Shuffle buffer and interleaving for streams.

use std::collections::VecDeque;

use super::{Items, Lazy};
use crate::Result;
use crate::rng::mix_seed;

/// Shuffle buffer.
pub(super) struct Mixed<T> {
    pub(super) items: Items<T>,
    pub(super) waiting: Vec<Lazy<T>>,
    pub(super) buffer: usize,
    pub(super) seed: u64,
    pub(super) drawn: u64,
}

impl<T> Iterator for Mixed<T> {
    type Item = Result<Lazy<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.waiting.len() < self.buffer {
            match self.items.next() {
                Some(Ok(item)) => self.waiting.push(item),
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        if self.waiting.is_empty() {
            return None;
        }
        let place = mix_seed(&[self.seed, self.drawn]) % self.waiting.len() as u64;
        self.drawn += 1;
        Some(Ok(self.waiting.swap_remove(place as usize)))
    }
}

/// Reads several iterators round-robin.
pub(super) struct Turns<S, I> {
    pub(super) opened: S,
    pub(super) running: VecDeque<I>,
    pub(super) cycle: usize,
    pub(super) block: usize,
    /// Items left to read from the first iterator before switching to the next.
    pub(super) left: usize,
}

impl<T, I: Iterator<Item = Result<T>>, S: Iterator<Item = Result<I>>> Iterator for Turns<S, I> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            while self.running.len() < self.cycle {
                match self.opened.next() {
                    Some(Ok(opened)) => self.running.push_back(opened),
                    Some(Err(error)) => return Some(Err(error)),
                    None => break,
                }
            }
            let first = self.running.front_mut()?;
            let Some(item) = first.next() else {
                // The next item takes the position of the iterator that ended.
                self.running.pop_front();
                self.left = self.block;
                if let Some(opened) = self.opened.next() {
                    match opened {
                        Ok(opened) => self.running.push_back(opened),
                        Err(error) => return Some(Err(error)),
                    }
                }
                continue;
            };
            self.left -= 1;
            if self.left == 0 {
                self.running.rotate_left(1);
                self.left = self.block;
            }
            return Some(item);
        }
    }
}
