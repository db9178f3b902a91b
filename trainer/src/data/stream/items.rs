//! Shuffle buffer and interleaving for streams.

use std::collections::VecDeque;

use super::{Items, Lazy};
use crate::Result;
use crate::rng::mix_seed;

/// Shuffle buffer.
pub(super) struct ShuffleBuffer<T> {
    pub(super) items: Items<T>,
    pub(super) buffered: Vec<Lazy<T>>,
    pub(super) capacity: usize,
    pub(super) seed: u64,
    pub(super) num_sampled: u64,
}

impl<T> Iterator for ShuffleBuffer<T> {
    type Item = Result<Lazy<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.buffered.len() < self.capacity {
            match self.items.next() {
                Some(Ok(item)) => self.buffered.push(item),
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        if self.buffered.is_empty() {
            return None;
        }
        let index = mix_seed(&[self.seed, self.num_sampled]) % self.buffered.len() as u64;
        self.num_sampled += 1;
        Some(Ok(self.buffered.swap_remove(index as usize)))
    }
}

/// Reads several iterators round-robin.
pub(super) struct Interleave<S, I> {
    pub(super) opened: S,
    pub(super) open: VecDeque<I>,
    pub(super) cycle: usize,
    pub(super) block: usize,
    /// Items left to read from the first iterator before switching to the next.
    pub(super) left_in_block: usize,
}

impl<T, I: Iterator<Item = Result<T>>, S: Iterator<Item = Result<I>>> Iterator
    for Interleave<S, I>
{
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            while self.open.len() < self.cycle {
                match self.opened.next() {
                    Some(Ok(opened)) => self.open.push_back(opened),
                    Some(Err(error)) => return Some(Err(error)),
                    None => break,
                }
            }
            let first = self.open.front_mut()?;
            let Some(item) = first.next() else {
                // The next item takes the position of the iterator that ended.
                self.open.pop_front();
                self.left_in_block = self.block;
                if let Some(opened) = self.opened.next() {
                    match opened {
                        Ok(opened) => self.open.push_back(opened),
                        Err(error) => return Some(Err(error)),
                    }
                }
                continue;
            };
            self.left_in_block -= 1;
            if self.left_in_block == 0 {
                self.open.rotate_left(1);
                self.left_in_block = self.block;
            }
            return Some(item);
        }
    }
}
