//! Computes the wait before the next attempt from the record.

use std::time::Duration;

use stoker_api::time::Timestamp;
use stoker_api::trial::{Attempt, AttemptEnd};

use super::{TrialRecord, attempt_of, first_counted_attempt};

/// Limits of a runner's back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOffLimits {
    /// Wait before the second restart in a row. The wait doubles with each further restart.
    pub first: Duration,
    /// Longest wait before a restart.
    pub max: Duration,
}

impl BackOffLimits {
    /// Limits of the operator.
    pub const CLUSTER: Self =
        Self { first: Duration::from_secs(10), max: Duration::from_secs(300) };
    /// Limits of `stoker run` and `stoker job run`.
    pub const LOCAL: Self =
        Self { first: Duration::from_millis(2500), max: Duration::from_secs(300) };

    /// Returns the wait after consecutive failures. The first restart is immediate.
    pub fn after_failures(&self, failures: u32) -> Duration {
        match failures {
            0 | 1 => Duration::ZERO,
            more => self.doubled(more - 2),
        }
    }

    /// Returns the wait after consecutive attempts that were not started. Even the first retry
    /// waits, because the same refusal is likely.
    pub fn after_refusals(&self, attempts: u32) -> Duration {
        match attempts {
            0 => Duration::ZERO,
            more => self.doubled(more - 1),
        }
    }

    fn doubled(&self, doublings: u32) -> Duration {
        self.first.saturating_mul(1 << doublings.min(16)).min(self.max)
    }
}

/// A wait before the next attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// Remaining wait.
    pub wait: Duration,
    /// Message or reason of the last attempt. If several attempts in a row were not started, also
    /// their number and the end of the first: such attempts count against no limit.
    pub why: String,
}

/// Returns the wait before the next attempt; `None` if the attempt may start now.
///
/// The wait grows with the number of consecutive attempts without a newer checkpoint, whether they
/// failed, were not started or exited as preempted. An attempt that ended as `RunnerLost` resets
/// the count, and so does the reopening of the trial.
///
/// There is no wait while the end of the last attempt is in the future, as after a failover from a
/// leader whose clock was ahead.
pub fn back_off(record: &TrialRecord, now: Timestamp, limits: &BackOffLimits) -> Option<BackOff> {
    let attempts = &record.status.attempts;
    let newest = record.status.checkpoints.last();
    let saved_by = newest.and_then(|checkpoint| attempt_of(&checkpoint.name));
    let first = first_counted_attempt(record);
    let is_fruitless = |attempt: &&Attempt| {
        let is_counted = matches!(
            attempt.end,
            Some(
                AttemptEnd::UserError
                    | AttemptEnd::Infrastructure
                    | AttemptEnd::NotStarted
                    | AttemptEnd::Preempted
            )
        );
        is_counted && Some(attempt.number) > saved_by && attempt.number >= first
    };
    let num_fruitless = attempts.iter().rev().take_while(is_fruitless).count() as u32;
    let last = attempts.last()?;
    let delay = match last.end {
        Some(AttemptEnd::NotStarted) => limits.after_refusals(num_fruitless),
        _ => limits.after_failures(num_fruitless),
    };
    let ended_at = last.ended_at.unwrap_or_default();
    // The clock that wrote a time in the future was ahead by an unknown amount, so part of the wait
    // may be over. Counting it from now at each wake-up would prolong it until that time, possibly
    // for hours. The next attempt ends by the clock that reads this record, so at most one wait is
    // lost, and restarts cannot follow each other without waits.
    if ended_at > now {
        return None;
    }
    let elapsed = Duration::from_secs(now.seconds_since(ended_at));
    let wait = delay.checked_sub(elapsed).filter(|wait| !wait.is_zero())?;
    let why = last.message.clone().or_else(|| last.reason.clone()).unwrap_or_default();
    Some(BackOff { wait, why: unstarted(attempts).unwrap_or_default() + &why })
}

/// Returns the number of attempts that were not started since another one; `None` if it is below 2.
fn unstarted(attempts: &[Attempt]) -> Option<String> {
    let is_unstarted = |attempt: &&Attempt| attempt.end == Some(AttemptEnd::NotStarted);
    let latest: Vec<_> = attempts.iter().rev().take_while(is_unstarted).collect();
    let first = latest.last().filter(|_| latest.len() > 1)?;
    let since = first.ended_at.unwrap_or_default();
    let num_attempts = latest.len();
    Some(format!("the last {num_attempts} attempts, since {since}, ended before training: "))
}

#[cfg(test)]
mod tests {
    use stoker_api::trial::CheckpointRecord;

    use super::*;
    use crate::fixture::plain_record;
    use crate::trial::{
        INFRASTRUCTURE_ATTEMPTS_MAX, RestartLimits, begin_attempt, closed, end_attempt,
    };

    /// Builds a record of attempts that ended at time 100, such as `Infra User ckpt1 Preempted`.
    /// `ckptN` is a checkpoint of attempt N.
    fn record(text: &str) -> TrialRecord {
        let mut record = plain_record(0);
        for word in text.split_whitespace() {
            if let Some(attempt) = word.strip_prefix("ckpt") {
                record.status.checkpoints.push(CheckpointRecord {
                    name: format!("000000000009-{attempt}"),
                    batches: 9,
                    metric: None,
                    manifest_sha256: String::new(),
                    bytes: 0,
                    refused: false,
                });
                continue;
            }
            let end = match word {
                "Infra" => AttemptEnd::Infrastructure,
                "User" => AttemptEnd::UserError,
                "Preempted" => AttemptEnd::Preempted,
                "NotStarted" => AttemptEnd::NotStarted,
                "RunnerLost" => AttemptEnd::RunnerLost,
                other => panic!("{other}"),
            };
            let number = record.status.attempts.len() as u32;
            let ended_at = Some(Timestamp(100));
            let (end, message) = (Some(end), Some(format!("why {number}")));
            let attempt = Attempt { number, end, ended_at, message, ..Attempt::default() };
            record.status.attempts.push(attempt);
        }
        record
    }

    #[track_caller]
    fn check(text: &str, limits: BackOffLimits, expected_ms: u128) {
        let wait = back_off(&record(text), Timestamp(100), &limits);
        assert_eq!(wait.map_or(0, |back_off| back_off.wait.as_millis()), expected_ms, "{text}");
    }

    #[test]
    fn both_runners_double_up_to_five_minutes() {
        let local = [0, 0, 2500, 5000, 10_000, 20_000, 40_000, 80_000, 160_000, 300_000, 300_000];
        let cluster = [0, 0, 10_000, 20_000, 40_000, 80_000, 160_000, 300_000, 300_000];
        for (limits, waits) in
            [(BackOffLimits::LOCAL, &local[..]), (BackOffLimits::CLUSTER, &cluster)]
        {
            for (failures, wait) in waits.iter().enumerate() {
                check(&"Infra ".repeat(failures), limits, *wait);
            }
            check(&"User ".repeat(128), limits, 300_000);
        }
    }

    /// For example, a disk that is full for a minute must not end a trial.
    #[test]
    fn a_trial_survives_minutes_of_infrastructure_failures() {
        for back_off_limits in [BackOffLimits::LOCAL, BackOffLimits::CLUSTER] {
            let limits = RestartLimits::new(0, back_off_limits, false);
            let (mut record, mut now) = (plain_record(0), Duration::ZERO);
            for number in 0..INFRASTRUCTURE_ATTEMPTS_MAX {
                assert_eq!(closed(&record), None);
                let wait = back_off(&record, Timestamp(0), &back_off_limits);
                now += wait.map_or(Duration::ZERO, |back_off| back_off.wait);
                begin_attempt(&mut record, number);
                end_attempt(&mut record, AttemptEnd::Infrastructure, None, &limits);
            }
            assert!(closed(&record).is_some());
            assert!(now > Duration::from_secs(600), "{now:?}");
        }
    }

    #[test]
    fn a_newer_checkpoint_resets_the_wait() {
        for (limits, first) in [(BackOffLimits::LOCAL, 2500), (BackOffLimits::CLUSTER, 10_000)] {
            check("Infra Infra ckpt1", limits, 0);
            check("Infra Infra ckpt0", limits, 0);
            check("Infra ckpt0 Infra Infra", limits, first);
            check("Infra Infra Infra ckpt0 ckpt1", limits, 0);
        }
    }

    #[test]
    fn every_fruitless_end_counts() {
        for (limits, first) in [(BackOffLimits::LOCAL, 2500), (BackOffLimits::CLUSTER, 10_000)] {
            check("Preempted", limits, 0);
            check("Preempted Preempted", limits, first);
            check("User Preempted Infra", limits, 2 * first);
            // An attempt that was not started gives no reason to retry at once.
            check("NotStarted", limits, first);
            check("NotStarted NotStarted", limits, 2 * first);
            check("Infra NotStarted", limits, 2 * first);
            // The user ended the runner, or stopped the trial.
            check("Infra Infra RunnerLost", limits, 0);
            check("Infra Infra RunnerLost Infra", limits, 0);
        }
    }

    #[test]
    fn the_wait_counts_from_the_last_end() {
        let record = record("Infra Infra");
        let wait = |now| back_off(&record, Timestamp(now), &BackOffLimits::LOCAL);
        let rest = BackOff { wait: Duration::from_millis(1500), why: "why 1".to_owned() };
        assert_eq!(wait(101), Some(rest));
        assert_eq!(wait(102).map(|back_off| back_off.wait), Some(Duration::from_millis(500)));
        assert_eq!(wait(103), None);
    }

    #[test]
    fn attempts_that_were_not_started_are_counted() {
        let check = |text: &str, expected: &str| {
            let wait = back_off(&record(text), Timestamp(100), &BackOffLimits::CLUSTER).unwrap();
            assert_eq!(wait.why, expected, "{text}");
        };
        check("Infra Infra", "why 1");
        check("NotStarted Infra NotStarted", "why 2");
        let prefix = "attempts, since 1970-01-01T00:01:40Z, ended before training: why";
        check("NotStarted NotStarted", &format!("the last 2 {prefix} 1"));
        let many = "Infra ".to_owned() + &"NotStarted ".repeat(12);
        check(&many, &format!("the last 12 {prefix} 12"));
    }

    /// A leader whose clock was two hours ahead ended the last attempt of each trial at time 100.
    #[test]
    fn a_clock_that_was_ahead_prolongs_no_wait() {
        for limits in [BackOffLimits::LOCAL, BackOffLimits::CLUSTER] {
            let mut record = record("Infra Infra Infra");
            let instants = [-7100, -7099, -6800, 0, 99];
            let is_waiting = |now: &i64| back_off(&record, Timestamp(*now), &limits).is_some();
            assert_eq!(instants.iter().find(|now| is_waiting(now)), None);
            // The new leader's clock ends the next attempt, which waits again.
            begin_attempt(&mut record, 3);
            end_attempt(
                &mut record,
                AttemptEnd::Infrastructure,
                None,
                &RestartLimits::new(5, limits, false),
            );
            record.status.attempts[3].ended_at = Some(Timestamp(-7090));
            let waits = [-7090, -7089, -7050].map(|now| back_off(&record, Timestamp(now), &limits));
            let waits =
                waits.map(|back_off| back_off.map_or(0, |rest| rest.wait.as_millis() as u64));
            let delay = limits.first.as_millis() as u64 * 4;
            assert_eq!(waits, [delay, delay - 1000, 0]);
        }
    }
}
