//! Writes of turns to their homes.
//!
//! If the API server does not answer such a write, the turn may be stored, or may still be stored
//! later. The cache may lack it, and a pass that works from the cache would give its position to
//! another event. The home is therefore *unsettled* until it gets a new version: the response
//! contains the turn, or the late write fails. Until then, nothing is decided.
//!
//! An admission rule may refuse the new version and accept the turn: the log is in the subresource
//! `status`, which rules usually do not match. The home is then unsettled until the write cannot
//! be stored any more, and is read again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stoker_api::experiment::Phase;
use stoker_engine::experiment::{Write, append};
use tokio::time::Instant;

use super::apply::{Writer, write_status};
use crate::cache::{Cached as _, Key};
use crate::context::Context;
use crate::error::Error;
use crate::leader::{fence_experiment, fence_trial, read_experiment, read_trial};

/// Time after which a write is stored or has failed. The API server processes a request for at most
/// 60 seconds by default.
const WRITE_MAX: Duration = Duration::from_secs(90);

/// Object that records a turn.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Home {
    /// The log of the experiment.
    Experiment,
    /// The grants of this trial.
    Trial(Key),
}

/// Homes with a write whose outcome is unknown, and the time of the write, by experiment.
#[derive(Debug, Default)]
pub struct UnsettledHomes {
    homes: Mutex<HashMap<Key, HashMap<Home, Instant>>>,
}

impl UnsettledHomes {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, HashMap<Home, Instant>>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, experiment: &Key, home: Home) {
        self.lock().entry(experiment.clone()).or_default().insert(home, Instant::now());
    }

    fn remove(&self, experiment: &Key, home: &Home) {
        self.lock().retain(|key, homes| {
            if key == experiment {
                homes.remove(home);
            }
            !homes.is_empty()
        });
    }

    fn of(&self, experiment: &Key) -> Vec<(Home, Instant)> {
        let homes = self.lock();
        let homes = homes.get(experiment).into_iter().flatten();
        homes.map(|(home, written_at)| (home.clone(), *written_at)).collect()
    }
}

/// Gives new versions to the unsettled homes of an experiment. Homes for which this fails stay
/// unsettled.
pub(super) async fn settle(context: &Context, key: &Key) {
    for (home, written_at) in context.unsettled_homes.of(key) {
        match settle_home(context, key, &home, written_at).await {
            Ok(()) => context.unsettled_homes.remove(key, &home),
            Err(error) => tracing::warn!(experiment = %key, %error, "nothing is decided; retrying"),
        }
    }
}

async fn settle_home(
    context: &Context,
    key: &Key,
    home: &Home,
    written_at: Instant,
) -> Result<(), Error> {
    let fenced = match home {
        Home::Experiment => fence_experiment(context, key).await,
        Home::Trial(trial) => fence_trial(context, trial).await,
    };
    match (fenced, home) {
        (Err(error), Home::Experiment) if is_readable(&error, written_at) => {
            read_experiment(context, key).await
        }
        (Err(error), Home::Trial(trial)) if is_readable(&error, written_at) => {
            read_trial(context, trial).await
        }
        (fenced, _) => fenced,
    }
}

/// Returns whether the stored object contains an earlier write if it was accepted. `error` is the
/// response to a fence.
fn is_readable(error: &Error, written_at: Instant) -> bool {
    matches!(error, Error::Refused { .. }) && written_at.elapsed() >= WRITE_MAX
}

impl Writer<'_> {
    /// Checks that no home of the experiment is unsettled, so that the search may decide.
    pub(super) fn check_settled(&self) -> Result<(), Error> {
        let key = Key::of(&self.experiment);
        if self.context.unsettled_homes.of(&key).is_empty() {
            return Ok(());
        }
        let reason = "the outcome of an earlier write is unknown".to_owned();
        Err(Error::Unavailable { operation: format!("decide on experiment {key}"), reason })
    }

    /// Writes a turn to its home.
    pub(super) async fn write_home(&mut self, write: Write) -> Result<(), Error> {
        let home = match &write {
            Write::Log(_) => Some(Home::Experiment),
            Write::Grant { trial, .. } => {
                self.trials.get(trial).map(|trial| Home::Trial(trial.key()))
            }
            Write::Pin { .. } => None,
        };
        let Some(home) = home else { return Ok(()) };
        let (key, unsettled) = (Key::of(&self.experiment), &self.context.unsettled_homes);
        // This pass may end during the write, for example because this replica stops leading.
        unsettled.add(&key, home.clone());
        let written = self.write_turn(write).await;
        if !matches!(written, Err(Error::Unavailable { .. })) {
            unsettled.remove(&key, &home);
        }
        written
    }

    async fn write_turn(&mut self, write: Write) -> Result<(), Error> {
        match write {
            Write::Log(entry) => {
                let mut status = self.status();
                // An ended experiment would be cleaned up, and its new trials be killed.
                if status.phase.is_terminal() && entry.continues_search() {
                    status.phase = Phase::Pending;
                }
                append(&mut status.log, entry);
                let log = status.log.clone();
                self.experiment = write_status(self.context, &self.experiment, status).await?;
                self.is_all_stored &= self.status().log == log;
                Ok(())
            }
            Write::Grant { trial, grant } => self.effects(vec![(trial, grant)]).await,
            Write::Pin { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experiments_have_separate_homes() {
        let unsettled = UnsettledHomes::default();
        let (first, second) = (Key::new("ns", "a"), Key::new("ns", "b"));
        let trial = || Home::Trial(Key::new("ns", "a-0"));
        unsettled.add(&first, Home::Experiment);
        unsettled.add(&first, trial());
        unsettled.add(&second, Home::Experiment);
        unsettled.remove(&first, &Home::Experiment);
        let homes =
            |key: &Key| unsettled.of(key).into_iter().map(|(home, _)| home).collect::<Vec<_>>();
        assert_eq!(homes(&first), [trial()]);
        assert_eq!(homes(&second), [Home::Experiment]);
        unsettled.remove(&first, &trial());
        assert_eq!(homes(&first), []);
        assert_eq!(unsettled.lock().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn refused_fences_wait_for_the_earlier_write() {
        let operation = || "touch experiment ns/a".to_owned();
        let refused =
            Error::Refused { operation: operation(), code: 403, message: "denied".to_owned() };
        let unavailable =
            Error::Unavailable { operation: operation(), reason: "no response".to_owned() };
        let written_at = Instant::now();
        assert!(!is_readable(&refused, written_at));
        tokio::time::advance(WRITE_MAX).await;
        assert!(is_readable(&refused, written_at));
        assert!(!is_readable(&unavailable, written_at));
    }
}
