//! Writes of turns to their homes.
//!
//! If the API server does not answer such a write, the turn may be stored, or may still be stored
//! later. The cache may lack it, and a pass that works from the cache would give its position to
//! another event. The home is therefore *unsettled* until it gets a new version: the response
//! contains the turn, or the late write fails. Until then, nothing is decided.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use stoker_api::experiment::Phase;
use stoker_engine::experiment::{Write, append};

use super::apply::{Writer, write_status};
use crate::cache::{Cached as _, Key};
use crate::context::Context;
use crate::error::Error;
use crate::leader::{fence_experiment, fence_trial};

/// Object that records a turn.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Home {
    /// The log of the experiment.
    Experiment,
    /// The grants of this trial.
    Trial(Key),
}

/// Homes with a write whose outcome is unknown, by experiment.
#[derive(Debug, Default)]
pub struct UnsettledHomes {
    homes: Mutex<HashMap<Key, HashSet<Home>>>,
}

impl UnsettledHomes {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, HashSet<Home>>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, experiment: &Key, home: Home) {
        self.lock().entry(experiment.clone()).or_default().insert(home);
    }

    fn remove(&self, experiment: &Key, home: &Home) {
        self.lock().retain(|key, homes| {
            if key == experiment {
                homes.remove(home);
            }
            !homes.is_empty()
        });
    }

    fn of(&self, experiment: &Key) -> Vec<Home> {
        self.lock().get(experiment).into_iter().flatten().cloned().collect()
    }
}

/// Gives new versions to the unsettled homes of an experiment. Homes for which this fails stay
/// unsettled.
pub(super) async fn settle(context: &Context, key: &Key) {
    for home in context.unsettled_homes.of(key) {
        let fenced = match &home {
            Home::Experiment => fence_experiment(context, key).await,
            Home::Trial(trial) => fence_trial(context, trial).await,
        };
        match fenced {
            Ok(()) => context.unsettled_homes.remove(key, &home),
            Err(error) => tracing::warn!(experiment = %key, %error, "nothing is decided; retrying"),
        }
    }
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
        assert_eq!(unsettled.of(&first), [trial()]);
        assert_eq!(unsettled.of(&second), [Home::Experiment]);
        unsettled.remove(&first, &trial());
        assert_eq!(unsettled.of(&first), []);
        assert_eq!(unsettled.lock().len(), 1);
    }
}
