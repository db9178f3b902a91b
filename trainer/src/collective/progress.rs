//! Progress of a rank, as reported to the watchdog, and the limits without progress.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use stoker_api::names::{ENV_SILENCE_SECONDS, ENV_SILENCE_STEPS};

use super::Kind;
use crate::Result;

/// Number of steps for the median step duration.
const STEPS: usize = 101;
/// Size of a heartbeat: step, collective calls in the step, activity, state of the gang.
pub(super) const BEAT_BYTES: usize = 32;

/// Limits on the time without progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limits {
    /// Minimum limit.
    pub(super) silence: Duration,
    /// Minimum limit as a multiple of the median step duration.
    pub(super) steps: f64,
}

impl Limits {
    const SILENCE: Duration = Duration::from_secs(300);
    const STEPS: f64 = 10.0;
    /// Environment variables that override the defaults: seconds and number of steps. 0 seconds
    /// disables the watchdog.
    const ENV_SILENCE: &'static str = ENV_SILENCE_SECONDS;
    const ENV_STEPS: &'static str = ENV_SILENCE_STEPS;

    /// Reads the limits from the environment.
    ///
    /// # Errors
    ///
    /// Fails if a variable is not a number.
    pub(super) fn from_environment() -> Result<Self> {
        let number = |name: &str, default: f64| match std::env::var(name) {
            Err(_) => Ok(default),
            Ok(text) => match text.parse::<f64>() {
                Ok(number) if number.is_finite() && (0.0..1e9).contains(&number) => Ok(number),
                _ => Err(format!("{name} is {text:?}, but must be a number")),
            },
        };
        let silence = number(Self::ENV_SILENCE, Self::SILENCE.as_secs_f64())?;
        let steps = number(Self::ENV_STEPS, Self::STEPS)?;
        Ok(Self { silence: Duration::from_secs_f64(silence), steps })
    }

    pub(super) fn limit(&self, step: Duration) -> Option<Duration> {
        let of_steps = Duration::try_from_secs_f64(step.as_secs_f64() * self.steps);
        (!self.silence.is_zero()).then(|| self.silence.max(of_steps.unwrap_or(Duration::MAX)))
    }
}

/// Progress of this rank, as reported to the other ranks.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// Current step, counted from 1; 0 before and after training.
    step: AtomicU64,
    /// Number of collective calls since the step began.
    calls: AtomicU64,
    /// Current activity in the lowest byte; above it, a counter of activity changes.
    doing: AtomicU64,
    /// Counter by which rank 0 reports progress of any rank; other ranks only see rank 0's
    /// heartbeats.
    gang: AtomicU64,
    /// Whether a rank received a stop request, as far as this rank knows.
    is_asked: AtomicBool,
    /// Whether training is over.
    is_resting: AtomicBool,
    /// Whether this process ends with an error.
    has_failed: AtomicBool,
    /// Last batch reported by a custom training loop, and the number of such reports.
    reported: AtomicU64,
    reports: AtomicU64,
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
pub(crate) enum Doing {
    /// Training.
    Train = 0,
    /// Validation or prediction.
    Evaluate = 101,
    /// Waiting for the storage or the runner, which have their own timeouts.
    Wait = 102,
    /// Clean exit.
    Over = 103,
}

impl Pulse {
    /// Marks the begin of a step.
    pub(crate) fn step(&self, number: u64) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(last) = steps.last.replace(now) {
            steps.seconds.push_back((now - last).as_secs_f64());
            if steps.seconds.len() > STEPS {
                steps.seconds.pop_front();
            }
        }
        self.is_resting.store(false, Ordering::Relaxed);
        self.step.store(number + 1, Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
        self.tick(Doing::Train);
    }

    /// Marks training as over: the watchdog ignores what the program does afterwards.
    pub(crate) fn rest(&self) {
        *self.steps.lock().unwrap_or_else(PoisonError::into_inner) = Steps::default();
        self.step.store(0, Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
        self.is_resting.store(true, Ordering::Relaxed);
        self.tick(Doing::Wait);
    }

    /// Returns `true` if training is over.
    pub(super) fn is_resting(&self) -> bool {
        self.is_resting.load(Ordering::Relaxed)
    }

    /// Returns `true` if a step was completed. Before that, data is read and kernels are compiled.
    pub(super) fn has_begun(&self) -> bool {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        !steps.seconds.is_empty() || self.reports.load(Ordering::Relaxed) > 1
    }

    /// Records progress and the next activity.
    pub(crate) fn tick(&self, doing: Doing) {
        self.set(doing as u8);
    }

    fn set(&self, doing: u8) {
        let before = self.doing.load(Ordering::Relaxed);
        let times = (before >> 8).wrapping_add(1) << 8;
        self.doing.store(times | u64::from(doing), Ordering::Relaxed);
    }

    /// Marks the begin of a collective call. Calls within a pod are not counted, since pods may
    /// differ.
    pub(super) fn enter(&self, kind: Kind, is_of_all: bool) {
        self.calls.fetch_add(u64::from(is_of_all), Ordering::Relaxed);
        self.set(kind as u8);
    }

    /// Records data transfer within a collective call.
    pub(super) fn flow(&self) {
        self.doing.fetch_add(1 << 8, Ordering::Relaxed);
    }

    /// Marks the end of a collective call.
    pub(super) fn leave(&self) {
        self.tick(Doing::Train);
    }

    /// Records a stop request; the next heartbeats notify all ranks.
    pub(crate) fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if a rank received a stop request, as far as this rank knows.
    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Relaxed)
    }

    /// Adds to the time that the loop has waited for data.
    pub(crate) fn waited_for_data(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.data_wait.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the total time that the loop has waited for data.
    pub(crate) fn data_wait(&self) -> Duration {
        Duration::from_nanos(self.data_wait.load(Ordering::Relaxed))
    }

    /// Records a batch reported by a custom training loop, which may not use steps.
    pub(crate) fn reported(&self, batches: u64) {
        if self.reported.fetch_max(batches, Ordering::Relaxed) < batches {
            self.reports.fetch_add(1, Ordering::Relaxed);
        }
        self.tick(Doing::Train);
    }

    /// Describes the position of the loop, human-readable.
    pub(crate) fn place(&self) -> String {
        let place = self.beat().place();
        match self.reported.load(Ordering::Relaxed) {
            0 => place,
            batches => format!("{place}, last reported batch {batches}"),
        }
    }

    /// Records that this process exits with an error, so that it sends no shutdown message.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Announces a clean exit, unless this process exits with an error. Other ranks then ignore the
    /// end of its connections.
    pub(super) fn part(&self) -> bool {
        let is_well = self.is_well();
        if is_well {
            self.set(Doing::Over as u8);
        }
        is_well
    }

    /// Returns `true` unless this process exits with an error.
    pub(super) fn is_well(&self) -> bool {
        !self.has_failed.load(Ordering::Relaxed) && !std::thread::panicking()
    }

    /// Records on rank 0 that some rank makes progress.
    pub(super) fn gang_moves(&self) {
        self.gang.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn median_step(&self) -> Duration {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seconds: Vec<f64> = steps.seconds.iter().copied().collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or_default();
        Duration::from_secs_f64(median)
    }

    pub(super) fn beat(&self) -> Beat {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (step, calls) = (load(&self.step), load(&self.calls));
        let stop_flag = if self.is_asked() { ASKED } else { 0 };
        Beat { step, calls, doing: load(&self.doing), gang: load(&self.gang) & !ASKED | stop_flag }
    }
}

/// Bit of a heartbeat's `gang` field: a rank received a stop request.
const ASKED: u64 = 1 << 63;

/// Heartbeat: position and activity of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Beat {
    step: u64,
    calls: u64,
    doing: u64,
    gang: u64,
}

impl Beat {
    pub(super) fn to_bytes(self) -> [u8; BEAT_BYTES] {
        let mut bytes = [0; BEAT_BYTES];
        for (index, number) in
            [self.step, self.calls, self.doing, self.gang].into_iter().enumerate()
        {
            bytes[index * 8..index * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; BEAT_BYTES]) -> Self {
        let number = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Self { step: number(0), calls: number(1), doing: number(2), gang: number(3) }
    }

    fn kind(&self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u64 == self.doing & 0xff)
    }

    /// Returns `true` if a rank received a stop request.
    pub(super) fn asks(&self) -> bool {
        self.gang & ASKED != 0
    }

    pub(super) fn is_over(&self) -> bool {
        self.doing & 0xff == Doing::Over as u64
    }

    /// Returns `true` if the rank is in a collective call.
    pub(super) fn is_together(&self) -> bool {
        self.kind().is_some()
    }

    pub(super) fn waits(&self) -> bool {
        self.doing & 0xff == Doing::Wait as u64
    }

    /// Returns the position in training, for comparisons.
    pub(super) fn progress(&self) -> (u64, u64, bool) {
        (self.step, self.calls, self.kind().is_some())
    }

    pub(super) fn place(&self) -> String {
        let what = match (self.kind(), self.doing & 0xff) {
            (Some(kind), _) => format!("in {} {}", kind.name(), self.calls),
            (None, doing) if doing == Doing::Evaluate as u64 => "in a validation".into(),
            (None, doing) if doing == Doing::Wait as u64 => {
                "waiting for the storage or the runner".into()
            }
            _ => format!("after {} collective calls", self.calls),
        };
        match self.step.checked_sub(1) {
            Some(step) => format!("at step {step} {what}"),
            None => format!("before its first step {what}"),
        }
    }
}
