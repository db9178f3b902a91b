//! Ranks as threads of one process; the reference implementation of [`Collective`].

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytes::Bytes;

use super::ring::{Buffer, Summable};
use super::{Collective, sum_in_rank_order};
use crate::Result;
use crate::error::PeerFailed;

/// One of several ranks in this process.
///
/// Dropping it makes the calls of all other ranks fail, as the exit of a process does.
#[derive(Debug)]
pub struct ThreadRank {
    rank: usize,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    size: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    /// Contribution of each rank to the current round.
    contributions: Vec<Option<Bytes>>,
    /// All contributions to the previous round.
    completed: Vec<Bytes>,
    has_exited: bool,
}

impl ThreadRank {
    /// Creates `size` ranks, in order, one for each thread.
    pub fn group(size: usize) -> Vec<Self> {
        let round = Round { contributions: vec![None; size], ..Round::default() };
        let group = Arc::new(Group { size, round: Mutex::new(round), changed: Condvar::new() });
        (0..size).map(|rank| Self { rank, group: group.clone() }).collect()
    }

    fn sum<T: Summable>(&self, mut values: Buffer<'_, T>) -> Result<()> {
        sum_in_rank_order(&self.all_gather(values.to_bytes().into())?, &mut values)
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        let mut round = self.group.round.lock().unwrap_or_else(PoisonError::into_inner);
        round.has_exited = true;
        self.group.changed.notify_all();
    }
}

impl Collective for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        self.sum(Buffer::new(&mut [], std::iter::once(values)))
    }

    fn sum_segments(&self, head: &mut [f64], segments: &mut [&mut [f32]]) -> Result<()> {
        self.sum(Buffer::new(head, segments.iter_mut().map(|segment| &mut **segment)))
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.sum(Buffer::new(&mut [], std::iter::once(values)))
    }

    fn all_gather(&self, local: Bytes) -> Result<Vec<Bytes>> {
        let mut round = self.group.round.lock().unwrap_or_else(PoisonError::into_inner);
        let number = round.number;
        round.contributions[self.rank] = Some(local);
        if round.contributions.iter().all(Option::is_some) {
            // Safe to overwrite: a round completes only after all ranks have read the previous one.
            round.completed = round.contributions.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            self.group.changed.notify_all();
        }
        let is_pending = |round: &mut Round| round.number == number && !round.has_exited;
        let round = self.group.changed.wait_while(round, is_pending);
        let round = round.unwrap_or_else(PoisonError::into_inner);
        match round.number == number {
            true => Err(PeerFailed("a rank of this process exited".into()).into()),
            false => Ok(round.completed.clone()),
        }
    }
}
