//! What ranks do together.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::contract::TrialConfig;

use crate::Result;
use crate::error::Infrastructure;
use crate::stop::StopSignal;

mod rendezvous;
mod tcp;

/// Sums over ranks. Every rank calls the same methods in the same order and gets the same bits; a
/// failure is final for the process.
pub trait Collective: Send + Sync + std::fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Replaces `values` by their sums over all ranks.
    ///
    /// # Errors
    ///
    /// Another rank is gone.
    fn sum_f32(&self, values: &mut [f32]) -> Result<()>;

    /// Replaces `values` by their sums over all ranks.
    ///
    /// # Errors
    ///
    /// Another rank is gone.
    fn sum_f64(&self, values: &mut [f64]) -> Result<()>;

    /// What each rank gives, in the order of ranks, on every rank.
    ///
    /// # Errors
    ///
    /// Another rank is gone.
    fn gather(&self, mine: Bytes) -> Result<Vec<Bytes>>;

    /// What rank 0 gives, on every rank; what the others give is not looked at.
    ///
    /// # Errors
    ///
    /// Another rank is gone.
    fn broadcast(&self, mine: Bytes) -> Result<Bytes> {
        let mine = if self.rank() == 0 { mine } else { Bytes::new() };
        Ok(self.gather(mine)?.swap_remove(0))
    }

    /// This rank's share of a batch size.
    ///
    /// # Errors
    ///
    /// The batch has no sample for each rank.
    fn shard_batch_size(&self, global: usize) -> Result<usize> {
        let size = self.size();
        if global < size {
            let text = format!("global_batch_size is {global}, but there are {size} ranks");
            return Err(crate::InvalidHyperparameters(text).into());
        }
        Ok(global / size)
    }
}

/// One rank: it has every sum already.
#[derive(Debug)]
pub(crate) struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum_f32(&self, _values: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn sum_f64(&self, _values: &mut [f64]) -> Result<()> {
        Ok(())
    }

    fn gather(&self, mine: Bytes) -> Result<Vec<Bytes>> {
        Ok(vec![mine])
    }
}

/// What each rank says at one place of the program, in the order of ranks.
///
/// # Errors
///
/// Another rank is gone, or is somewhere else: the program does not do the same on all ranks.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    ranks: &dyn Collective,
    place: &str,
    mine: T,
) -> Result<Vec<T>> {
    if ranks.size() == 1 {
        return Ok(vec![mine]);
    }
    let said = ranks.gather(serde_json::to_vec(&(place, mine))?.into())?;
    let read = |(rank, said): (usize, &Bytes)| -> Result<T> {
        let (other, said): (String, T) = match serde_json::from_slice(said) {
            Ok(said) => said,
            // It is read as what is said elsewhere: its place alone is of interest.
            Err(error) => match serde_json::from_slice::<(String, serde_json::Value)>(said) {
                Ok((other, _)) if other != place => return Err(elsewhere(rank, &other, place)),
                _ => return Err(format!("rank {rank} says what cannot be read: {error}").into()),
            },
        };
        if other == place { Ok(said) } else { Err(elsewhere(rank, &other, place)) }
    };
    said.iter().enumerate().map(read).collect()
}

fn elsewhere(rank: usize, other: &str, place: &str) -> crate::Error {
    format!(
        "rank {rank} is at its {other}, this rank at its {place}: callbacks and data must be the \
         same on all ranks"
    )
    .into()
}

/// This process's place in its gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
}

impl Place {
    /// Of a process that trains alone.
    pub(crate) const ALONE: Self = Self { rank: 0, world_size: 1 };

    /// What the launcher says, of the gang that the trial has.
    ///
    /// # Errors
    ///
    /// It says nothing, or something else than the trial.
    pub(crate) fn from_environment(config: &TrialConfig) -> Result<Self> {
        let Some(gang) = config.gang.as_ref().filter(|it| it.world_size > 1) else {
            return Ok(Self::ALONE);
        };
        let number = |name: &str| -> Result<u32> {
            let number = std::env::var(name).ok().and_then(|it| it.parse().ok());
            Ok(number.ok_or_else(|| {
                let size = gang.world_size;
                Infrastructure(format!(
                    "the trial has {size} ranks, but {name} is not set to a number: start the \
                     program by `stoker-trainer launch -- PROGRAM`"
                ))
            })?)
        };
        let place = Self { rank: number("RANK")?, world_size: number("WORLD_SIZE")? };
        if place.world_size != gang.world_size || place.rank >= gang.world_size {
            return Err(Infrastructure(format!(
                "this is rank {} of {}, but the trial has {} ranks",
                place.rank, place.world_size, gang.world_size
            ))
            .into());
        }
        Ok(place)
    }

    /// Meets the other ranks.
    ///
    /// # Errors
    ///
    /// They did not come in time, or `stop` was set before.
    pub(crate) fn join(
        self,
        config: &TrialConfig,
        stop: &StopSignal,
    ) -> Result<Box<dyn Collective>> {
        match &config.gang {
            Some(gang) if self.world_size > 1 => {
                Ok(Box::new(rendezvous::meet(gang, config.attempt, self.rank, stop)?))
            }
            _ => Ok(Box::new(Alone)),
        }
    }
}

#[cfg(test)]
mod tests;
