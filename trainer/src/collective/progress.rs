//! Progress of a rank, as reported to the watchdog, and the limits without progress.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use stoker_api::names::{ENV_SILENCE_SECONDS, ENV_SILENCE_STEPS};

use super::CollectiveOp;
use crate::Result;
use crate::error::Unrecoverable;

/// Number of steps for the median step duration.
const MEDIAN_STEPS: usize = 101;
/// Size of a heartbeat: step, collective calls in the step, activity, state of the gang.
pub(super) const HEARTBEAT_BYTES: usize = 32;

/// Limits on the time without progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StallLimits {
    /// Minimum limit.
    pub(super) min: Duration,
    /// Minimum limit as a multiple of the median step duration.
    pub(super) steps: f64,
}

impl StallLimits {
    const MIN_DEFAULT: Duration = Duration::from_secs(300);
    const STEPS_DEFAULT: f64 = 10.0;

    /// Reads the limits in seconds and steps from the environment. 0 seconds disables the watchdog.
    ///
    /// # Errors
    ///
    /// Fails if a variable is not a number.
    pub(super) fn from_environment() -> Result<Self> {
        let number = |name: &str, default: f64| match std::env::var(name) {
            Err(_) => Ok(default),
            Ok(text) => match text.parse::<f64>() {
                Ok(number) if number.is_finite() && (0.0..1e9).contains(&number) => Ok(number),
                _ => Err(Unrecoverable(format!("{name} is {text:?}, but must be a number"))),
            },
        };
        let min = number(ENV_SILENCE_SECONDS, Self::MIN_DEFAULT.as_secs_f64())?;
        let steps = number(ENV_SILENCE_STEPS, Self::STEPS_DEFAULT)?;
        Ok(Self { min: Duration::from_secs_f64(min), steps })
    }

    /// Returns the limits for a process without other ranks; `None` unless the environment sets
    /// the seconds. Such a process blocks no other, so only its author knows what takes too long.
    ///
    /// # Errors
    ///
    /// Same as [`from_environment`](Self::from_environment).
    pub(super) fn of_single_rank() -> Result<Option<Self>> {
        match std::env::var_os(ENV_SILENCE_SECONDS) {
            Some(_) => Self::from_environment().map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn limit(&self, step: Duration) -> Option<Duration> {
        let of_steps = Duration::try_from_secs_f64(step.as_secs_f64() * self.steps);
        (!self.min.is_zero()).then(|| self.min.max(of_steps.unwrap_or(Duration::MAX)))
    }
}

/// Progress of this rank, as reported to the other ranks.
#[derive(Debug, Default)]
pub(crate) struct ProgressState {
    /// Current step, counted from 1; 0 before and after training.
    step: AtomicU64,
    /// Number of collective calls since the step began.
    calls: AtomicU64,
    /// Current activity in the lowest byte; above it, a counter of activity changes.
    activity: AtomicU64,
    /// Counter by which rank 0 reports progress of any rank; other ranks only see rank 0's
    /// heartbeats.
    gang: AtomicU64,
    /// Whether a rank received a stop request, as far as this rank knows.
    is_stop_requested: AtomicBool,
    /// Whether training is over.
    is_training_finished: AtomicBool,
    /// Whether this process ends with an error.
    has_failed: AtomicBool,
    /// Last batch reported by a custom training loop, and the number of such reports.
    batches_reported: AtomicU64,
    num_reports: AtomicU64,
    /// Nanoseconds that the loop has waited for data.
    data_wait: AtomicU64,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    last: Option<Instant>,
    seconds: VecDeque<f64>,
}

/// Activity of a rank between collective calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RankActivity {
    /// Training.
    Train = 0,
    /// Validation or prediction.
    Evaluate = 101,
    /// Waiting for the storage or the runner. The watchdog does not report such a rank.
    Wait = 102,
    /// Clean exit.
    Exited = 103,
}

impl ProgressState {
    /// Marks the begin of a step.
    pub(crate) fn begin_step(&self, number: u64) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(last) = steps.last.replace(now) {
            steps.seconds.push_back((now - last).as_secs_f64());
            if steps.seconds.len() > MEDIAN_STEPS {
                steps.seconds.pop_front();
            }
        }
        self.is_training_finished.store(false, Ordering::Relaxed);
        self.step.store(number + 1, Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
        self.record_activity(RankActivity::Train);
    }

    /// Marks training as over: the watchdog ignores what the program does afterwards.
    pub(crate) fn training_finished(&self) {
        *self.steps.lock().unwrap_or_else(PoisonError::into_inner) = Steps::default();
        self.step.store(0, Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
        self.is_training_finished.store(true, Ordering::Relaxed);
        self.record_activity(RankActivity::Wait);
    }

    /// Returns `true` if training is over.
    pub(super) fn is_training_finished(&self) -> bool {
        self.is_training_finished.load(Ordering::Relaxed)
    }

    /// Returns `true` if a step was completed. Before that, data is read and kernels are compiled.
    pub(super) fn has_completed_step(&self) -> bool {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        !steps.seconds.is_empty() || self.num_reports.load(Ordering::Relaxed) > 1
    }

    /// Records progress and the next activity.
    pub(crate) fn record_activity(&self, activity: RankActivity) {
        self.set(activity as u8);
    }

    /// Calls `wait`, which may wait long for the storage or the runner, and then restores the
    /// activity. The watchdog does not report this rank meanwhile.
    pub(crate) fn while_waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.with_activity(RankActivity::Wait, wait)
    }

    /// Calls `access`, which accesses a directory of the user, and then restores the activity. A
    /// network file system may never respond, so the watchdog judges this rank, also within
    /// [`while_waiting`](Self::while_waiting).
    pub(crate) fn while_accessing_files<T>(&self, access: impl FnOnce() -> T) -> T {
        self.with_activity(RankActivity::Train, access)
    }

    fn with_activity<T>(&self, activity: RankActivity, act: impl FnOnce() -> T) -> T {
        let current = self.activity.load(Ordering::Relaxed) & 0xff;
        let is_current = |activity: &RankActivity| *activity as u64 == current;
        let before = [RankActivity::Evaluate, RankActivity::Wait].into_iter().find(is_current);
        self.record_activity(activity);
        let result = act();
        self.record_activity(before.unwrap_or(RankActivity::Train));
        result
    }

    fn set(&self, activity: u8) {
        let before = self.activity.load(Ordering::Relaxed);
        let times = (before >> 8).wrapping_add(1) << 8;
        self.activity.store(times | u64::from(activity), Ordering::Relaxed);
    }

    /// Marks the begin of a collective call. Calls within a pod are not counted, since pods may
    /// differ.
    pub(super) fn begin_call(&self, op: CollectiveOp, is_of_all: bool) {
        self.calls.fetch_add(u64::from(is_of_all), Ordering::Relaxed);
        self.set(op as u8);
    }

    /// Records data transfer within a collective call, or a part of a file.
    pub(crate) fn record_transfer(&self) {
        self.activity.fetch_add(1 << 8, Ordering::Relaxed);
    }

    /// Marks the end of a collective call.
    pub(super) fn end_call(&self) {
        self.record_activity(RankActivity::Train);
    }

    /// Records a stop request; the next heartbeats notify all ranks.
    pub(crate) fn request_stop(&self) {
        self.is_stop_requested.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if a rank received a stop request, as far as this rank knows.
    pub(crate) fn is_stop_requested(&self) -> bool {
        self.is_stop_requested.load(Ordering::Relaxed)
    }

    /// Adds to the time that the loop has waited for data.
    pub(crate) fn add_data_wait(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.data_wait.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the total time that the loop has waited for data.
    pub(crate) fn data_wait(&self) -> Duration {
        Duration::from_nanos(self.data_wait.load(Ordering::Relaxed))
    }

    /// Records a batch reported by a custom training loop, which may not use steps. Returns whether
    /// it has reported different batches.
    pub(crate) fn record_batches(&self, batches: u64) -> bool {
        if self.batches_reported.fetch_max(batches, Ordering::Relaxed) < batches {
            self.num_reports.fetch_add(1, Ordering::Relaxed);
        }
        self.record_activity(RankActivity::Train);
        self.num_reports.load(Ordering::Relaxed) > 1
    }

    /// Describes the position of the loop, human-readable.
    pub(crate) fn position(&self) -> String {
        let position = self.heartbeat().position();
        match self.batches_reported.load(Ordering::Relaxed) {
            0 => position,
            batches => format!("{position}, last reported batch {batches}"),
        }
    }

    /// Records that this process exits with an error, so that it sends no shutdown message.
    pub(crate) fn record_failure(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Announces a clean exit, unless this process exits with an error. Other ranks then ignore the
    /// end of its connections.
    pub(super) fn announce_exit(&self) -> bool {
        let exits_cleanly = self.exits_cleanly();
        if exits_cleanly {
            self.set(RankActivity::Exited as u8);
        }
        exits_cleanly
    }

    /// Returns `true` unless this process exits with an error.
    pub(super) fn exits_cleanly(&self) -> bool {
        !self.has_failed.load(Ordering::Relaxed) && !std::thread::panicking()
    }

    /// Records on rank 0 that some rank makes progress.
    pub(super) fn record_gang_progress(&self) {
        self.gang.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn median_step(&self) -> Duration {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seconds: Vec<f64> = steps.seconds.iter().copied().collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or_default();
        Duration::from_secs_f64(median)
    }

    pub(super) fn heartbeat(&self) -> Heartbeat {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (step, calls) = (load(&self.step), load(&self.calls));
        let stop_flag = if self.is_stop_requested() { STOP_REQUEST_BIT } else { 0 };
        Heartbeat {
            step,
            calls,
            activity: load(&self.activity),
            gang: load(&self.gang) & !STOP_REQUEST_BIT | stop_flag,
        }
    }
}

/// Bit of a heartbeat's `gang` field: a rank received a stop request.
const STOP_REQUEST_BIT: u64 = 1 << 63;

/// Heartbeat: position and activity of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Heartbeat {
    step: u64,
    calls: u64,
    activity: u64,
    gang: u64,
}

impl Heartbeat {
    pub(super) fn to_bytes(self) -> [u8; HEARTBEAT_BYTES] {
        let mut bytes = [0; HEARTBEAT_BYTES];
        for (index, number) in
            [self.step, self.calls, self.activity, self.gang].into_iter().enumerate()
        {
            bytes[index * 8..index * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; HEARTBEAT_BYTES]) -> Self {
        let number = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Self { step: number(0), calls: number(1), activity: number(2), gang: number(3) }
    }

    fn op(&self) -> Option<CollectiveOp> {
        CollectiveOp::ALL.into_iter().find(|op| *op as u64 == self.activity & 0xff)
    }

    /// Returns `true` if a rank received a stop request.
    pub(super) fn has_stop_request(&self) -> bool {
        self.gang & STOP_REQUEST_BIT != 0
    }

    pub(super) fn has_exited(&self) -> bool {
        self.activity & 0xff == RankActivity::Exited as u64
    }

    /// Returns `true` if the rank is in a collective call.
    pub(super) fn is_in_collective(&self) -> bool {
        self.op().is_some()
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.activity & 0xff == RankActivity::Wait as u64
    }

    /// Returns the position in training, for comparisons.
    pub(super) fn progress(&self) -> (u64, u64, bool) {
        (self.step, self.calls, self.op().is_some())
    }

    pub(super) fn position(&self) -> String {
        let calls = || match self.calls {
            1 => "after 1 collective call".into(),
            calls => format!("after {calls} collective calls"),
        };
        format!("{} {}", self.step_name(), self.state().unwrap_or_else(calls))
    }

    /// Same as [`position`](Self::position), without the number of collective calls. A single rank
    /// makes none.
    pub(super) fn position_of_single_rank(&self) -> String {
        match self.state() {
            Some(state) => format!("{} {state}", self.step_name()),
            None => self.step_name(),
        }
    }

    fn step_name(&self) -> String {
        match self.step.checked_sub(1) {
            Some(step) => format!("at step {step}"),
            None => "before its first step".into(),
        }
    }

    /// Describes the activity, unless the rank trains.
    fn state(&self) -> Option<String> {
        match (self.op(), self.activity & 0xff) {
            (Some(op), _) => Some(format!("in {} {}", op.name(), self.calls)),
            (None, activity) if activity == RankActivity::Evaluate as u64 => {
                Some("in a validation".into())
            }
            (None, activity) if activity == RankActivity::Wait as u64 => {
                Some("waiting for the storage or the runner".into())
            }
            _ => None,
        }
    }
}
